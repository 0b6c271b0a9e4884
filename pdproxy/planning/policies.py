"""The policies for choosing among several nodes, by their names in the settings."""

from pdproxy.planning.cache_aware import ITL_BUDGET, CacheAware
from pdproxy.planning.plan import LEAST_LOADED, RoutingPolicy
from pdproxy.planning.session import Session
from pdproxy.settings.types import Routing


def policy_named(name: Routing, itl_budget: float = ITL_BUDGET) -> RoutingPolicy:
    """The policy of a name; ``itl_budget`` as in `CacheAware`, for `cache`."""
    match name:
        case Routing.CACHE:
            return CacheAware(itl_budget)
        case Routing.SESSION:
            return Session()
        case Routing.LEAST_LOADED:
            return LEAST_LOADED
