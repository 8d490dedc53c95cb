"""The components of a database, and the order in which they begin and end."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import kvdb.hardware.cpu as cpu
import kvdb.hardware.kernels as kernels
import kvdb.hardware.profile as profile
from kvdb.catalog.durable.stored_catalog import open_catalog
from kvdb.catalog.evictor import open_evictor
from kvdb.catalog.evidence.habits import Habits
from kvdb.catalog.segments.segment import Segment
from kvdb.config import Config
from kvdb.errors import ConfigError, InvalidArgument
from kvdb.events import Events
from kvdb.gpu.interface import GpuInterface
from kvdb.gpu.opening import open_accelerator, open_backend, open_configured_device
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.indexing.background_time import BackgroundTime
from kvdb.indexing.builder import IndexBuilder
from kvdb.ingest.cold import Cold
from kvdb.ingest.compactor import Compactor
from kvdb.ingest.publisher import Publisher
from kvdb.session.activity import SessionActivity
from kvdb.session.late_proofs import LateProofs
from kvdb.session.open_handles import OpenHandles
from kvdb.session.services import SessionServices
from kvdb.storage.store import BlockStore
from query_optimizer.build_policy import BuildPolicy
from query_optimizer.custom_rules import BadRule, PlacedRule, add_rules
from query_optimizer.optimizer import Optimizer, UnknownRule
from query_optimizer.rules import base_rules


class Components:
    """What a database is made of. Each knows those before it.

    blocks: of all tiers. catalog: the contexts. builder, advisor: make indexes, and decide which. compactor: gives space back.
    publisher: makes contexts. auditor, prover: make proofs beside steps, and when nobody steps. handles: open sessions and
    imports. services: all that sessions use of it.
    """

    def __init__(self, config: Config, rules: Sequence[PlacedRule]) -> None:
        """rules: added to those of the optimizer. A number of threads in the configuration is the process's from now on.

        Raises ConfigError for a rule in the configuration that does not exist, for a GPU that does not exist or is too small,
        InvalidArgument for a rule that cannot be added, and what `open_catalog` and `StoreFolder` raise.
        """
        cpu.use(config.cpu)
        try:
            base = base_rules(config.optimizer.short_context_tokens, config.indexes.on_demand)
            self.optimizer = Optimizer(add_rules(base, rules), config.optimizer.rules_off, by_name=bool(rules))
        except BadRule as error:
            raise InvalidArgument(f"rules: {error}") from None
        except UnknownRule as error:
            raise ConfigError(f"optimizer.rules_off: {error}") from None
        measured = profile.load(config.optimizer.machine_file)
        self.machine = measured.machine
        kernels.use(measured.kernels)
        self.events = events = Events()
        device = open_configured_device(config.storage)
        self.blocks = blocks = BlockStore(config.storage, device)
        blocks.loader.events = blocks.loader.pool.events = events
        self.catalog = open_catalog(blocks, config.storage.durability)
        self.catalog.events = events
        self.gpu: GpuInterface | None = open_backend(device, blocks, config.optimizer.machine_file)
        open_evictor(self.catalog, blocks, config.storage.eviction)
        indexes, time = config.indexes, BackgroundTime()
        accelerator = open_accelerator(device)
        self.builder = IndexBuilder(blocks.loader, indexes.threads, indexes.bytes_max, accelerator, events, time)
        self.advisor = IndexAdvisor(self.builder, BuildPolicy(indexes.opened_often), indexes)
        self.compactor = Compactor(self.catalog, blocks, self.advisor, Cold.of(config.storage))
        self.publisher = Publisher(self.catalog, blocks, self.advisor, self.compactor)
        self.handles = OpenHandles()
        self.auditor = ThreadPoolExecutor(1, "kvdb-audit")
        self.prover = LateProofs(blocks.budget, time, partial(self.builder.wait, 0))
        self.services = SessionServices(
            config=config,
            optimizer=self.optimizer,
            machine=self.machine,
            gpu=self.gpu,
            advisor=self.advisor,
            budget=blocks.budget,
            loader=blocks.loader,
            handles=self.handles,
            publisher=self.publisher,
            space=self.compactor,
            auditor=self.auditor,
            prover=self.prover,
            background_time=time,
            habits=Habits(),
            activity=SessionActivity(),
            events=events,
        )

    def held_segments(self) -> list[Segment]:
        """The segments that what works in the background holds."""
        held = [*self.builder.held_segments(), *self.compactor.held_segments(), *self.prover.held_segments()]
        return held if self.gpu is None else [*held, *self.gpu.held_segments()]

    def close(self) -> None:
        """End all of it, once new calls are refused and those under way have ended."""
        self.prover.close()
        self.blocks.loader.close()  # so that nobody waits for a segment any more
        self.builder.close()  # nor for an index
        self.compactor.stop()
        self.handles.close()
        self.auditor.shutdown()
        self.compactor.close()
        if self.gpu is not None:
            self.gpu.close()
        self.catalog.close()
        self.blocks.close()
