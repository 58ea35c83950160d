"""Who is next: the waiting queue.

One queue for all workers, in three levels. **Classes** share the tokens by weighted fair queueing:
each has a virtual time that grows with the tokens it is given, the slower the greater its weight,
and the class with the least goes first (a tie goes to the more important one). Weights move: while
a class misses its TTFT target, less important ones shrink to their floors, the least important
first, and they grow back once it is met. **Tenants** of a class share it in the same way with fixed
weights. That is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et
al., OSDI 2024): a tenant that was idle is lifted to the others' virtual time, so it can neither
save up service nor be held back by what others took. **Within a tenant** the earliest target for
the first token goes first (EDF), then the order of arrival. Nothing starves: every weight is at
least one, and a target that was set earlier comes before all that are set much later.

Owns the order and nothing of what requests hold.
"""

import heapq
from collections.abc import Iterable, Iterator

from services.scheduler.core.config import Config, Policy, PriorityClass
from services.scheduler.core.plan import AddRequest
from services.scheduler.core.request import Request, Status

OUTPUT_COST = 2
"""What an output token is charged, in prompt tokens; the ratio of Sheng et al."""

_ATTAINED_PER_MILLE = 950
"""A class meets its target while so many of its recent requests did."""

_ATTAINMENT_WINDOW = 16
"""Requests over which attainment is averaged, exponentially."""

_IDLE_FLOWS = 256
"""So many tenants are remembered before those without requests are swept."""

_REMEMBERED_FLOWS = 128
"""Of the tenants without requests so many are remembered at most, those ahead of their share."""

_CONTENDERS = 7
"""Entries of a heap that are looked at: its three first are always among them."""


class Flow:
    """The requests of one tenant in one class.

    Args:
        group: its class.
        tenant: its name.
        number: unique among the flows of a queue.
        weight: per mille.
    """

    __slots__ = (
        "group",
        "heap",
        "is_ready",
        "live",
        "number",
        "served",
        "served_tokens",
        "tenant",
        "tokens",
        "waiting",
        "weight",
    )

    def __init__(self, group: "ClassQueue", tenant: str, number: int, weight: int) -> None:
        self.group = group
        self.tenant = tenant
        self.number = number
        self.weight = weight
        self.served = 0
        """Virtual time: tokens charged, times 1000 / weight."""
        self.served_tokens = 0
        self.live = 0
        self.waiting = 0
        self.tokens = 0
        """Of the requests that wait."""
        self.is_ready = False
        """It has an entry in its class's heap of flows."""
        self.heap: list[tuple[int, int, int, Request]] = []


class ClassQueue:
    """One class: its weight, how it fares, and its flows."""

    def __init__(self, spec: PriorityClass, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.weight = spec.share
        self.served = 0
        """Virtual time: tokens charged, times 1000 / weight."""
        self.waiting = 0
        self.tokens = 0
        """Of the requests that wait."""
        self.attained = 1000
        """Requests that met their TTFT target lately, per mille."""
        self.ttft_met = self.ttft_missed = 0
        self.targets_met = self.targets_missed = 0
        self.flows: dict[str, Flow] = {}
        self.virtual_time = 0
        """Of the flow served last; a flow that was idle starts from it."""
        self._ready: list[tuple[int, int, Flow]] = []
        """A heap with an entry for each flow where requests wait, and late for some others."""

    def push(self, request: Request, flow: Flow) -> None:
        """Queues a request of one of the flows."""
        if not flow.waiting:
            flow.served = max(flow.served, self.virtual_time)
        if not flow.is_ready:
            flow.is_ready = True
            heapq.heappush(self._ready, (flow.served, flow.number, flow))
        flow.waiting += 1
        self.waiting += 1
        request.queued_tokens = request.num_tokens
        flow.tokens += request.queued_tokens
        self.tokens += request.queued_tokens
        request.ticket += 1
        heapq.heappush(flow.heap, (request.due, request.arrival, request.ticket, request))

    def head(self) -> Request | None:
        """The request that is next within the class; it stays queued."""
        while self._ready:
            served, number, flow = self._ready[0]
            if not flow.waiting:
                heapq.heappop(self._ready)
                flow.is_ready = False
            elif served != flow.served:
                heapq.heapreplace(self._ready, (flow.served, number, flow))
            else:
                return self._head_of(flow)
        return None

    def contenders(self) -> list[Request]:
        """The next requests of those flows that are about to be next, best first."""
        if self.head() is None:
            return []
        flows = [flow for _, _, flow in self._ready[:_CONTENDERS] if flow.waiting]
        flows.sort(key=lambda flow: (flow.served, flow.number))
        return [self._head_of(flow) for flow in flows]

    def remove(self, request: Request, flow: Flow) -> None:
        """Takes a queued request out."""
        request.ticket += 1
        flow.waiting -= 1
        self.waiting -= 1
        flow.tokens -= request.queued_tokens
        self.tokens -= request.queued_tokens
        if not flow.waiting:
            flow.heap.clear()

    def _head_of(self, flow: Flow) -> Request:
        while True:
            _, _, ticket, request = flow.heap[0]
            if request.ticket == ticket and request.status is Status.WAITING:
                return request
            heapq.heappop(flow.heap)

    def charge(self, flow: Flow, tokens: int) -> None:
        """Counts tokens given to a flow."""
        flow.served += tokens * 1000 // flow.weight
        flow.served_tokens += tokens
        self.served += tokens * 1000 // self.weight

    def first_token(self, *, met: bool) -> None:
        """Notes whether a request met its TTFT target."""
        self.ttft_met += met
        self.ttft_missed += not met
        self.attained += (1000 * met - self.attained) // _ATTAINMENT_WINDOW

    @property
    def is_attained(self) -> bool:
        """Whether it meets its TTFT target of late."""
        return self.attained >= _ATTAINED_PER_MILLE


class WaitingQueue:
    """Requests that hold no blocks. Ended ones drop out lazily.

    Args:
        config: policy, classes and tenants.
    """

    def __init__(self, config: Config) -> None:
        self._size = 0
        self._live_flows = 0
        self._classes: list[ClassQueue] = []
        self._flows: dict[int, Flow] = {}
        self._next_flow = 0
        self._sweep_at = _IDLE_FLOWS
        self._virtual_time = 0
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Takes another configuration and forgets all requests; they must join anew.

        What the classes have counted stays.
        """
        self._size = self._live_flows = 0
        before = {group.spec.name: group for group in self._classes}
        self._flows.clear()
        self._config = config
        self._tenants = dict(config.tenants)
        self._classes = [ClassQueue(spec, rank) for rank, spec in enumerate(config.classes)]
        self._ranks = {spec.name: rank for rank, spec in enumerate(config.classes)}
        for group in self._classes:
            old = before.get(group.spec.name)
            if old is not None:
                group.ttft_met, group.ttft_missed = old.ttft_met, old.ttft_missed
                group.targets_met, group.targets_missed = old.targets_met, old.targets_missed

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in order of arrival."""
        entries = [
            (request.arrival, request)
            for group in self._classes
            for flow in group.flows.values()
            for _, _, ticket, request in flow.heap
            if request.ticket == ticket and request.status is Status.WAITING
        ]
        return (request for _, request in sorted(entries, key=lambda entry: entry[0]))

    @property
    def classes(self) -> list[ClassQueue]:
        """All classes, the most important first."""
        return self._classes

    @property
    def is_shared(self) -> bool:
        """Whether requests of more than one flow may be live: order is more than arrival."""
        return self._live_flows > 1

    def rank(self, class_name: str) -> int | None:
        """The rank of a class by name; "" is the default one. None: there is no such class."""
        return self._ranks.get(class_name or self._config.default_class)

    def join(self, request: Request) -> None:
        """Gives a request that was accepted its class and flow; `leave` when it ends.

        A class that has gone since counts as the default one.
        """
        rank = self.rank(request.spec.priority_class)
        request.rank = self._ranks[self._config.default_class] if rank is None else rank
        group = self._classes[request.rank]
        tenant = request.spec.tenant if self._config.policy is Policy.FAIR else ""
        flow = group.flows.get(tenant) or self._new_flow(group, tenant)
        if not flow.live:
            self._live_flows += 1
        flow.live += 1
        request.flow = flow.number
        request.due = self._due(request)

    def leave(self, request: Request) -> None:
        """Counts out a request that has ended, or that joins anew."""
        flow = self._flows[request.flow]
        flow.live -= 1
        if not flow.live:
            self._live_flows -= 1

    def push(self, request: Request) -> None:
        """Queues a request that has joined and whose status is WAITING."""
        flow = self._flows[request.flow]
        group = flow.group
        if not group.waiting:
            group.served = max(group.served, self._virtual_time)
        group.push(request, flow)
        self._size += 1

    def pop(self, now: int, above: int | None = None) -> Request | None:
        """Takes the next request, or None.

        Args:
            now: microseconds.
            above: only from classes more important than this rank; by order of arrival: none.
        """
        request = self._next(now, above)
        if request is not None:
            self.remove(request)
        return request

    def heads(self) -> list[Request]:
        """The next request of each class that has one, the most important class first."""
        return [head for group in self._classes if (head := group.head()) is not None]

    def contenders(self) -> list[Request]:
        """As `heads`, but more of a class: also the requests of the tenants that are next after."""
        return [request for group in self._classes for request in group.contenders()]

    def remove(self, request: Request) -> None:
        """Takes a queued request out of the middle."""
        flow = self._flows[request.flow]
        flow.group.remove(request, flow)
        self._size -= 1

    def push_back(self, requests: Iterable[Request]) -> None:
        """Queues again what `pop` gave."""
        for request in requests:
            self.push(request)

    def admitted(self, request: Request, tokens: int) -> None:
        """Notes that a request taken out is given service.

        Args:
            request: of which flow and class.
            tokens: to charge for it.
        """
        flow = self._flows[request.flow]
        group = flow.group
        group.virtual_time = max(group.virtual_time, flow.served)
        self._virtual_time = max(self._virtual_time, group.served)
        group.charge(flow, tokens)

    def charge(self, request: Request, tokens: int) -> None:
        """Counts tokens given to a running request."""
        flow = self._flows[request.flow]
        flow.group.charge(flow, tokens)

    def first_token(self, request: Request, *, met: bool) -> None:
        """Notes whether a request met its TTFT target, and moves the weights by it."""
        group = self._flows[request.flow].group
        group.first_token(met=met)
        lower = self._classes[group.rank + 1 :]
        if not group.is_attained:
            for other in reversed(lower):
                if other.weight > other.spec.floor:
                    other.weight = max(other.spec.floor, other.weight * 7 // 8)
                    return
        elif all(one.is_attained for one in self._classes[: group.rank + 1]):
            for other in lower:
                if other.weight < other.spec.share:
                    grown = other.weight + max(1, other.spec.share // 16)
                    other.weight = min(other.spec.share, grown)
                    return

    def _next(self, now: int, above: int | None) -> Request | None:
        policy = self._config.policy
        heads = self.heads()
        if above is not None:
            if policy is Policy.FCFS:
                return None
            heads = [head for head in heads if head.rank < above]
        if len(heads) <= 1:
            return heads[0] if heads else None
        if policy is Policy.FCFS:
            return min(heads, key=lambda head: head.arrival)
        if policy is Policy.PRIORITY:
            return min(heads, key=lambda head: (self.aged_rank(head, now), head.arrival))
        return min(heads, key=lambda head: (self._classes[head.rank].served, head.rank))

    def judged(self, request: Request, *, met: bool) -> None:
        """Notes whether a request that ended met all of its targets."""
        group = self._flows[request.flow].group
        group.targets_met += met
        group.targets_missed += not met

    def tokens_ahead(self, spec: AddRequest, rank: int) -> int:
        """Prompt tokens that are likely to be admitted before a new request.

        Those queued in more important classes, and in its own class those of its tenant, and of
        each other tenant as many at most.
        """
        group = self._classes[rank]
        tenant = spec.tenant if self._config.policy is Policy.FAIR else ""
        own = group.flows.get(tenant)
        own_tokens = own.tokens if own is not None else 0
        most = own_tokens + int(spec.prompt.size)
        others = sum(min(flow.tokens, most) for flow in group.flows.values() if flow is not own)
        return sum(one.tokens for one in self._classes[:rank]) + own_tokens + others

    def served_tokens(self, tenant: str) -> int:
        """What a tenant was charged in all classes since it was last forgotten."""
        flows = [group.flows[tenant] for group in self._classes if tenant in group.flows]
        return sum(flow.served_tokens for flow in flows)

    def order(self, request: Request) -> None:
        """Takes over a target that has changed; the request must not be queued."""
        request.due = self._due(request)

    def check_invariants(self, live: Iterable[Request]) -> None:
        """Asserts that classes and flows count what is live and what waits."""
        requests = list(live)
        for group in self._classes:
            waiting = [r for r in requests if r.rank == group.rank and r.status is Status.WAITING]
            assert group.waiting == len(waiting), "a class counts other requests than wait"
            tokens = sum(flow.tokens for flow in group.flows.values())
            assert group.tokens == tokens == sum(r.queued_tokens for r in waiting), "tokens are off"
        for flow in self._flows.values():
            mine = [request for request in requests if request.flow == flow.number]
            assert flow.live == len(mine), "a flow counts other requests than are live"
            queued = sum(request.status is Status.WAITING for request in mine)
            assert flow.waiting == queued, "a flow counts other requests than wait"

    def flow(self, number: int) -> Flow:
        """A flow by its number."""
        return self._flows[number]

    def aged_rank(self, request: Request, now: int) -> int:
        """The request's rank; where classes are strict, one better for each ageing time it waits.

        Where classes have shares nothing starves anyway, and a request that waits behind others of
        its own tenant must not gain by that.
        """
        if self._config.policy is not Policy.PRIORITY:
            return request.rank
        return max(0, request.rank - (now - request.arrived) // self._config.ageing_us)

    def _new_flow(self, group: ClassQueue, tenant: str) -> Flow:
        if len(self._flows) >= self._sweep_at:
            self._sweep()
        policy = self._tenants.get(tenant, self._config.other_tenants)
        flow = Flow(group, tenant, self._next_flow, policy.weight)
        self._next_flow += 1
        group.flows[tenant] = self._flows[flow.number] = flow
        return flow

    def _sweep(self) -> None:
        """Forgets idle flows that would start from their class's virtual time anyway, and those
        least ahead of it beyond a number: names of tenants cost their callers nothing.
        """
        idle = [flow for flow in self._flows.values() if not flow.live]
        idle.sort(key=lambda flow: (flow.group.virtual_time - flow.served, flow.number))
        for place, flow in enumerate(idle):
            if place >= _REMEMBERED_FLOWS or flow.served <= flow.group.virtual_time:
                del self._flows[flow.number], flow.group.flows[flow.tenant]
        self._sweep_at = max(_IDLE_FLOWS, 2 * len(self._flows))

    def _due(self, request: Request) -> int:
        """What requests of one flow are ordered by: the instant of the target, or of arrival."""
        if self._config.policy is Policy.FCFS:
            return request.arrival
        if request.ttft_target_us is None:
            return request.arrived + _NO_TARGET_US
        return request.arrived + request.ttft_target_us


_NO_TARGET_US = 60_000_000
"""A request without a target is ordered as if it had this one, so that it does not starve."""
