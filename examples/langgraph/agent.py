"""An agent in LangGraph with a tool: the model, the calculator that it calls by "=", and the model again."""

import re

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from quartet_environment import Endpoint, Task

MOST_MESSAGES = 14


@tool
def calculate(terms: list[int]) -> str:
    """Add the terms of a sum."""
    return str(sum(terms)) if terms else "?"


def call_calculator(state: MessagesState) -> dict:
    """Call the tool with the sum that the model's message ends with."""
    text = "".join(message.content for message in state["messages"])
    terms = re.findall(r"[+-]?\d+", re.search(r"[-+\d]*=$", text)[0])
    return {"messages": [ToolMessage(calculate.invoke({"terms": terms}), tool_call_id="calculate")]}


def route(state: MessagesState) -> str:
    """After the model: to the calculator, or the end."""
    calls = state["messages"][-1].content.endswith("=") and len(state["messages"]) < MOST_MESSAGES
    return "calculator" if calls else END


async def play(task: Task, endpoint: Endpoint) -> float:
    """One sum, by the graph."""
    model = ChatOpenAI(
        model=endpoint.model,
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        stop=["="],
        extra_body={"include_stop_str_in_output": True},
    )

    async def call_model(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("calculator", call_calculator)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", route, ["calculator", END])
    graph.add_edge("calculator", "model")
    ended = await graph.compile().ainvoke({"messages": [HumanMessage(task.messages[0]["content"])]})
    found = re.search(r"<answer>(-?\d+)</answer>", ended["messages"][-1].content)
    return float(found is not None and found[1] == task.answer)
