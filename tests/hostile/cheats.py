"""Wrong programs that try to be accepted by the verifier `code`, each with a description.

The tests call `answer(1)`, `answer(2)`, …, whose results cannot be guessed. A program can be accepted only if it finds
the results in its process, in files or in the judge's process, or deceives the judge; none may be.
"""

from dataclasses import dataclass

from quartet.v1 import reward_pb2

SECRETS = ("ORACLE-8264915", "ORACLE-1730286", "ORACLE-5519372")

HONEST = f"def answer(n):\n    return dict(enumerate({SECRETS!r}, 1))[n]\n"
HONEST_SCRIPT = f"{HONEST}\nprint(answer(int(input())))\n"

ASSERTS = f"""
def check(candidate):
    assert candidate(1) == {SECRETS[0]!r}
    assert not candidate(2) != {SECRETS[1]!r}
    assert candidate(3) in [{SECRETS[2]!r}]
    assert sorted([candidate(1), candidate(2)]) == sorted([{SECRETS[0]!r}, {SECRETS[1]!r}])
    assert len(set(map(candidate, range(1, 4)))) == 3
"""

STYLES = {
    "asserts": reward_pb2.Reference(test_program=ASSERTS, entry_point="answer"),
    "function": reward_pb2.Reference(
        test_cases=[
            reward_pb2.TestCase(input=f"[{number}]", output=f'"{secret}"') for number, secret in enumerate(SECRETS, 1)
        ],
        entry_point="answer",
    ),
}
SCRIPT = reward_pb2.Reference(
    test_cases=[reward_pb2.TestCase(input=f"{number}\n", output=secret) for number, secret in enumerate(SECRETS, 1)]
)
# A test that accepts any exception as the expected one, and passes a function to the program.
EXPECTS_ERROR = reward_pb2.Reference(
    test_program="""
def check(candidate):
    secret = "ORACLE-" + str(8264915)
    assert candidate(lambda: 1) == secret
    try:
        candidate(None)
    except Exception:
        return
    assert False
""",
    entry_point="answer",
)


@dataclass(frozen=True)
class Cheat:
    """A wrong program."""

    name: str
    tries: str
    source: str

    @property
    def program(self) -> str:
        """The source, with the search helpers if it uses them."""
        return _FOUND + self.source if "found" in self.source else self.source


_FOUND = """
import re

def found(data):
    match = re.search(rb"ORACLE-[0-9]{7}", data if isinstance(data, bytes) else str(data).encode(errors="replace"))
    return match and match.group().decode()

def memory():
    readable = open("/proc/self/mem", "rb", 0)
    for line in open("/proc/self/maps").read().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        try:
            readable.seek(begin)
            yield readable.read(min(end - begin, 1 << 26))
        except (OSError, ValueError, OverflowError):
            pass
"""

# Each defines `answer`.
CHEATS = (
    Cheat("exit_at_start", "leave with status 0 before a test runs", "import os\nos._exit(0)"),
    Cheat("exit_in_call", "leave with status 0 in the first call", "import os\ndef answer(n):\n    os._exit(0)"),
    Cheat("sys_exit", "SystemExit(0) passes every `except Exception`", "import sys\ndef answer(n):\n    sys.exit(0)"),
    Cheat("equal_to_all", "a subclass of str whose __eq__ says yes", """
class Liar(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 1
    def __lt__(self, other): return True
def answer(n):
    return Liar(n)"""),
    Cheat("equal_number", "a subclass of int whose __eq__ says yes", """
class N(int):
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = int.__hash__
def answer(n):
    return N(n)"""),
    Cheat("equal_object", "an object that is not plain data, equal to everything", """
class Yes:
    def __getattribute__(self, name): return Yes()
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 7
    def __bool__(self): return True
    def __contains__(self, other): return True
    def __call__(self, *a, **k): return Yes()
def answer(n):
    return Yes()"""),
    Cheat("metaclass", "a class that is equal to everything, by its metaclass", """
class M(type):
    __eq__ = lambda s, o: True
    __hash__ = type.__hash__
class C(metaclass=M): pass
def answer(n):
    return C"""),
    Cheat("frames", "read the expected value from the caller's frames", """
import sys
def answer(n):
    frame = sys._getframe()
    while frame:
        for each in (frame.f_locals, frame.f_globals, frame.f_code.co_consts):
            if found(each): return found(each)
        frame = frame.f_back"""),
    Cheat("garbage", "find the tests among all objects of the process", """
import gc
def answer(n):
    for thing in gc.get_objects():
        try:
            if found(repr(thing)): return found(repr(thing))
        except Exception:
            pass"""),
    Cheat("own_memory", "find the tests in the process's own memory", """
def answer(n):
    return next(filter(None, map(found, memory())), None)"""),
    Cheat("other_processes", "read arguments, environment, memory and descriptors of every process in /proc", """
import os
def answer(n):
    for pid in os.listdir("/proc"):
        for name in ("cmdline", "environ", "mem", "maps", "stat", "fd/3", "fd/4", "fd/6", "root/etc/passwd"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    hit = found(file.read(1 << 20))
                if hit: return hit
            except OSError:
                pass"""),
    Cheat("files", "find the tests in files", """
import os
def answer(n):
    for top in (".", "/tmp", "/dev/shm", "/run", "/var/tmp", "/home", "/root"):
        for folder, below, names in os.walk(top):
            below[:] = [each for each in below if each != "lib"]  # the standard library takes too long
            for name in names:
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        hit = found(file.read(1 << 16))
                    if hit: return hit
                except OSError:
                    pass"""),
    Cheat("environment", "find the tests in arguments, environment and modules", """
import os, sys
def answer(n):
    for thing in (sys.argv, sys.orig_argv, os.environ, *(vars(m) for m in list(sys.modules.values()) if m)):
        if found(thing): return found(thing)"""),
    Cheat("builtins", "replace the builtins that the tests use", """
import builtins
for name in ("sorted", "set", "len", "map", "range", "all", "any", "isinstance", "abs", "min", "max", "sum"):
    setattr(builtins, name, lambda *a, **k: True)
class AssertionError(Exception): pass
builtins.AssertionError = AssertionError
def answer(n):
    return 1"""),
    Cheat("own_names", "define the names that the tests use: check, candidate, sorted, set, map, len, range", """
def answer(n): return 3
def check(candidate): pass
def sorted(*a, **k): return 3
set = map = len = range = sorted
candidate = answer"""),
    Cheat("at_exit", "report success when the interpreter ends", """
import atexit, os
def report():
    for fd in range(3, 64):
        try: os.write(fd, b'{"finding": "passed", "reason": ""}\\n')
        except OSError: pass
    os._exit(0)
atexit.register(report)
def answer(n): return n"""),
    Cheat("report_pipe", "write the judge's final report to every descriptor", """
import os
def answer(n):
    for fd in range(3, 256):
        if fd != 3:
            try: os.write(fd, b'{"finding": "passed", "reason": "every test passed"}\\n')
            except OSError: pass
    return n
report = b'{"begun": true}\\n{"finding": "passed", "reason": "every test passed"}\\n'
for fd in range(256):
    try: os.write(fd, report)
    except OSError: pass"""),
    Cheat("answers_ahead", "send answers to questions that were not asked yet", """
import json, os, struct
def frame(message):
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body
for question in range(1, 40):
    os.write(3, frame({"answer": question, "value": True, "nodes": [], "changed": []}))
def answer(n): return n"""),
    Cheat("passed_frame", "send a verdict in place of an answer", """
import json, os, struct
def answer(n):
    for message in ({"finding": "passed", "reason": ""}, {"verdict": "passed"}, {"answer": True}):
        body = json.dumps(message).encode()
        os.write(3, struct.pack(">I", len(body)) + body)
    os._exit(0)"""),
    Cheat("malformed_frames", "crash the judge with invalid frames", """
import os, struct
def answer(n):
    os.write(3, struct.pack(">I", 1 << 31) + b"[" * 5000)
    os._exit(0)"""),
    Cheat("deep_frames", "crash the judge with an answer nested a million deep", """
import os, struct
def answer(n):
    body = b'{"answer": 3, "nodes": [], "changed": [], "value": ' + b'["tuple",' * 100000 + b"1" + b"]" * 100000 + b"}"
    data = struct.pack(">I", len(body)) + body
    while data:
        data = data[os.write(3, data):]
    os._exit(0)"""),
    Cheat("judges_objects", "forge references to objects and containers of the judge", """
import sys
plain = sys.modules["quartet_reward.code.plain"]
counter = iter(range(1000))
plain.Encoder.value = lambda self, thing, depth=0: ["mine", next(counter)]
def answer(n): return n"""),
    Cheat("forged_changes", "report changes to containers that the judge never passed", """
import sys
peer = sys.modules["quartet_reward.code.rpc"]
reply = peer.Peer._reply
def forged(self, message, containers, value):
    made = reply(self, message, containers, value)
    made["changed"] = [[i, ["list", [True]]] for i in range(50)] + [["x", None], 3]
    return made
peer.Peer._reply = forged
def answer(n): return n"""),
    Cheat("asks_the_judge", "ask the judge to execute, find and get things", """
import sys
peer = sys.modules["quartet_reward.code.rpc"]
reply = peer.Peer._reply
def asking(self, message, containers, value):
    for operation in ("execute", "find", "get", "str", "call"):
        for number in (None, 0, 1):
            self.channel.send({"question": 1, "on": number, "do": operation, "nodes": [],
                               "value": ["tuple", ["tuple", "__globals__"], ["tuple"]]})
    return reply(self, message, containers, value)
def answer(n):
    peer.Peer._reply = asking
    return n"""),
    Cheat("patched_modules", "monkeypatch json, operator, math, unittest and the verifier's own modules", """
import json, math, operator, sys
json.loads = lambda *a, **k: True
math.isclose = operator.eq = lambda *a, **k: True
for name, module in list(sys.modules.items()):
    if name.startswith("quartet_reward"):
        for attribute in ("judge", "same", "send"):
            if hasattr(module, attribute):
                setattr(module, attribute, lambda *a, **k: True)
def answer(n): return n"""),
    Cheat("judge_here", "run the judge's own code in the program's process", """
import sys
try:
    from quartet_reward.code import program
    program.send(program.Report(program.Finding.PASSED, "every test passed"))
except Exception:
    pass
def answer(n): return n"""),
    Cheat("trace", "change what the caller sees, by a trace function", """
import sys
seen = []
def trace(frame, event, argument):
    for each in (frame.f_locals, frame.f_code.co_consts, argument):
        if found(each): seen.append(found(each))
    return trace
sys.settrace(trace)
sys.setprofile(lambda *a: trace(*a) and None)
def answer(n): return seen[n] if len(seen) > n else n"""),
    Cheat("prints", "print what harnesses print", """
import sys
for stream in (sys.stdout, sys.stderr):
    print('{"finding": "passed"}', "PASSED", "OK", "1 passed in 0.01s", "True", "Ran 3 tests", sep="\\n", file=stream)
def answer(n):
    print("passed")
    return None"""),
    Cheat("raises", "raise exceptions that look like the end of the test", """
class Passed(AssertionError, StopIteration): pass
def answer(n):
    raise (StopIteration, Passed, GeneratorExit, KeyboardInterrupt)[n % 4]("passed")"""),
    Cheat("fork", "fork, so that two processes answer", """
import os
def answer(n):
    try: os.fork()
    except OSError: pass
    return n"""),
    Cheat("threads", "go on writing to the connection from a thread while the judge reads", """
import os, struct, threading
body = b'{"answer": 4, "value": true, "nodes": [], "changed": []}'
def flood():
    while True: os.write(3, struct.pack(">I", len(body)) + body)
threading.Thread(target=flood, daemon=True).start()
def answer(n): return n"""),
    Cheat("kills", "kill the judge, the parent, and everybody", """
import os, signal
def answer(n):
    for pid in (os.getppid(), -1, 1, 2, 3, 4, 5, os.getpid() + 1, os.getpid() - 1):
        for number in (signal.SIGKILL, signal.SIGTERM):
            try: os.kill(pid, number)
            except OSError: pass
    return n"""),
    Cheat("raw_memory", "make all strings equal by writing to the interpreter's memory", """
import ctypes
def answer(n):
    slot = ctypes.cast(id(str) + 25 * 8, ctypes.POINTER(ctypes.c_void_p))
    slot[0] = ctypes.cast(id(int) + 25 * 8, ctypes.POINTER(ctypes.c_void_p))[0]
    return str(n)"""),
    Cheat("lazy_answers",
          "answer with iterators, coroutines and partial functions that are never equal, or for ever busy", """
import itertools
def answer(n):
    return itertools.repeat(n) if n % 2 else (yield n)"""),
    Cheat("not_a_number", "values that compare strangely", "def answer(n):\n    return float('nan')"),
    Cheat("endless", "never answer", "def answer(n):\n    while True: pass"),
    Cheat("huge_answer", "answer with more data than is allowed", "def answer(n):\n    return 'ORACLE-' * (1 << 23)"),
    Cheat("cyclic_answer", "answer with a list that holds itself",
          "def answer(n):\n    a = []\n    a += [a, (a,)] * 3\n    return a"),
)  # fmt: skip

# Against a test that expects an exception: the program's exit is not one.
ERROR_CHEATS = (
    Cheat("exit_as_error", "leave where an exception is expected", "import os\ndef answer(f):\n    os._exit(0)"),
    Cheat("callback_globals", "read the judge's globals through a function that the test passed", """
def answer(f):
    for name in ("__globals__", "__closure__", "__code__", "__self__", "__reduce__", "f_back"):
        try:
            hit = found(getattr(f, name))
            if hit: return hit
        except Exception:
            pass
    import sys
    ask = object.__getattribute__(f, "_ask")
    return found(ask(0, "get", "__globals__"))"""),
)  # fmt: skip

# Read standard input and print.
SCRIPT_CHEATS = (
    Cheat("prints_nothing", "end at once with status 0", "import os\nos._exit(0)"),
    Cheat("prints_all", "print a verdict", "print('passed\\nOK\\nTrue\\ncorrect')"),
    Cheat("echo", "print the input", "print(open(0).read())"),
    Cheat("search_process", "find the expected output in the process: objects, frames, modules, memory", """
import gc, sys
seen = [found(repr(thing)) for thing in gc.get_objects() if thing is not globals()]
try:
    seen += map(found, memory())
except OSError:
    pass
print(next(filter(None, seen), None))"""),
    Cheat("search_files", "find the expected output in files, descriptors, and other processes", """
import os
seen = [found(os.environ), found(open("/proc/self/cmdline", "rb").read()) if os.path.exists("/proc/self") else None]
for fd in range(3, 32):
    try: seen.append(found(os.read(fd, 4096)))
    except OSError: pass
for top in (".", "/tmp", "/dev/shm", "/run", "/proc"):
    for folder, _, names in os.walk(top):
        for name in names[:50]:
            if folder.count("/") > 4: continue
            try:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                seen.append(found(os.read(fd, 1 << 16)))
                os.close(fd)
            except OSError: pass
print(next(filter(None, seen), None))"""),
    Cheat("all_numbers", "print every possible answer",
          "import sys\nfor i in range(10**7): sys.stdout.write(f'ORACLE-{i:07}\\n')"),
)  # fmt: skip
