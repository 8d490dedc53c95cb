"""The services of a database that its planners use."""

from dataclasses import dataclass

from kvdb.config import Config
from kvdb.gpu.interface import GpuInterface
from kvdb.indexing.advisor import IndexAdvisor
from kvdb.storage.budget import CpuBudget
from query_optimizer.cost import Machine
from query_optimizer.optimizer import Optimizer


@dataclass(frozen=True)
class PlanningServices:
    """Everything that a planner uses from its database.

    machine: the speeds that costs are computed with. gpu: None without one. advisor: is told which indexes plans would use, and
    how often segments are queried. budget: the budget of main memory, in which everything counts that sessions keep beside
    blocks.
    """

    config: Config
    optimizer: Optimizer
    machine: Machine
    gpu: GpuInterface | None
    advisor: IndexAdvisor
    budget: CpuBudget
