"""Creates, starts and stops the broker's parts: Redis connections, servicer, notifier, sweeper."""

from quartet_broker.config import BrokerSection
from quartet_broker.servers import connect
from quartet_broker.servicer import BrokerServicer, add_to
from quartet_broker.sweeper import Sweeper
from quartet_common.config import LoadedConfig
from quartet_common.handshake import Idleness
from quartet_server.host import ServiceHost


async def serve(config: LoadedConfig[BrokerSection], host: ServiceHost) -> None:
    """Serve until stopped."""
    section = config.section
    servers = connect(section)
    servicer = BrokerServicer(servers, section, config.server.max_message_bytes)
    try:
        add_to(host, servicer)
        host.capabilities += ["broker.redis", "broker.curriculum"]
        host.on_drain(servicer.notifier.close)
        host.spawn(servicer.notifier.listen(), "subscription to Redis")
        sweeper = Sweeper(servicer.store, servicer.runs, host, section)
        host.spawn(sweeper.run(), "sweeper")
        host.report_idleness(Idleness())
        await host.run()
    finally:
        await servicer.aclose()
        await servers.aclose()
