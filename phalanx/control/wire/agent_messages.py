"""What agents and the server say to each other on ``/v1/agent``: msgpack, one message a frame.

Up: ``Register`` first, then the agent's messages of the gang's protocol, records of steps and
answers to requests for logs. Down: ``Welcome`` or ``Rejected`` first, then commands and those
requests.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import Struct

from phalanx.cluster.node import Node
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.messages import AgentMessage, InspectGang, Inventory
from phalanx.control.wire.shell_messages import ShellDown, ShellOutput
from phalanx.hardware.probe.description import NodeDescription
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_sample import NodeSample

PROTOCOL = 6  # both sides must speak the same
AGENT_PATH = "/v1/agent"


class AgentFrame(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all messages that are the shell's own."""


class Register(AgentFrame, frozen=True, tag=True):
    """First message of a connection: who the agent is and what runs there."""

    node: Node
    machine: str  # made once and kept in the agent's state folder: tells two of one name apart
    inventory: Inventory
    version: str  # of the package
    clock_ns: int  # its clock, to warn of skew
    protocol: int = PROTOCOL
    healthy: bool = True  # it passed its check at start
    store: str = ""  # host:port of the node's store, where ranks of a gang may meet
    key: str = ""  # the node's public key
    proof: bytes = b""  # that it has its key, or its link key: see ``node_key``
    linked: bool = False  # it is the link key
    description: NodeDescription = NodeDescription()  # of all that ``node`` is made of


class Described(AgentFrame, frozen=True, tag=True):
    """A node that is connected describes itself anew."""

    node: int
    described: Node
    description: NodeDescription


class SetUp(AgentFrame, frozen=True, tag=True):
    """Versions and settings of a node, as doctor's checks found them."""

    node: int
    versions: dict[str, str]
    settings: dict[str, str]  # by check


class AcceptanceNews(AgentFrame, frozen=True, tag=True):
    """How a burn-in goes; at its end the signed certificate, or why there is none."""

    node: int
    request: int
    text: str = ""
    certificate: bytes = b""
    problem: str = ""
    end: bool = False


class LogPart(AgentFrame, frozen=True, tag=True):
    """Some of a log, in answer to ``ReadLog``; ``end``: no more will come."""

    request: int
    data: bytes = b""
    end: bool = False
    problem: str = ""
    worker: int = -1  # whose file it is from; -1: from none
    behind: int = 0  # the place in that file behind it


class Welcome(AgentFrame, frozen=True, tag=True):
    """The agent is in: ``node`` is its number from here on, and ``NodeSeen`` is what it says next.

    Times on the wire are the server's: an agent adds ``clock_ns`` minus its own clock to what it
    reports and takes it off deadlines, so that a wrong clock does no harm.
    """

    node: int
    epoch: int
    heartbeat_ns: int
    lease_ns: int  # what it runs outlives the last sign of a controller this long
    silent_ns: int  # a keeper that does not answer for so long is replaced
    version: str
    clock_ns: int
    program_lease_ns: int = 0  # programs outlive the server's last answer this long
    link: bytes = b""  # the key that the agent's next connections are proved with


class RejectCode(StrEnum):
    """Why an agent is not let in, or no longer."""

    VERSION = "version"
    PROTOCOL = "protocol"
    NAME_TAKEN = "name_taken"
    WRONG_NODE = "wrong_node"
    BAD_NODE = "bad_node"
    WRONG_KEY = "wrong_key"  # it does not have the key of its node
    UNLINKED = "unlinked"  # the link key is not the server's: sign anew
    PENDING = "pending"  # an administrator has yet to let it in
    REPLACED = "replaced"  # the same agent has connected again
    NOT_LEADER = "not_leader"
    INTERNAL = "internal"


class Rejected(AgentFrame, frozen=True, tag=True):
    """The agent is not let in (or no longer), and what to do about it."""

    code: RejectCode
    message: str
    version: str  # of the server
    protocol: int = PROTOCOL
    retry: bool = False  # trying again later may help
    leader: str = ""  # URL of the server that leads, if another one does


class Deliver(AgentFrame, frozen=True, tag=True):
    """A command; answered by ``Applied``."""

    command: Command
    store: str = ""  # with Form: host:port where the ranks meet
    key: bytes = b""  # with Form: what the job's keepers prove to each other that they know


class Signed(AgentFrame, frozen=True, tag=True):
    """An order that starts something on a node, as the server's key has signed it.

    ``order``: ``Deliver`` with Form, ``OpenShell`` or ``StartAcceptance``, encoded; agents take
    none of them without this.
    """

    order: bytes
    signature: bytes


class OrderRefused(AgentFrame, frozen=True, tag=True):
    """An agent's answer to an order that this cluster's server has not signed."""

    node: int
    problem: str


class StartAcceptance(AgentFrame, frozen=True, tag=True):
    """Burn the node in, and certify what it reached. Only as a signed order."""

    request: int
    seconds: float
    loads: tuple[str, ...]
    dcgm_level: int = 0


class StopAcceptance(AgentFrame, frozen=True, tag=True):
    """End a burn-in with what it has measured."""

    request: int


class ReadLog(AgentFrame, frozen=True, tag=True):
    """Send the end of a rank's log (rank -1: of all ranks here) and, if asked, what comes after."""

    request: int
    job: int
    rank: int = -1
    tail_bytes: int = 65_536
    follow: bool = False
    since_seconds: float = 0.0  # only what was written in the last seconds; 0: whenever
    resume: bool = False  # from these places on, by worker; other workers' logs from their start
    places: dict[int, int] = {}


class StopLog(AgentFrame, frozen=True, tag=True):
    """Nobody reads any more; or, to ``finish``: what is there is read to its end, then no more."""

    request: int
    finish: bool = False


class Profile(AgentFrame, frozen=True, tag=True):
    """Have some ranks of a job trace their next steps, into the run's folder."""

    job: int
    ranks: tuple[int, ...]
    steps: int


class ReadSteps(AgentFrame, frozen=True, tag=True):
    """Send what ranks here recorded of some steps, as lines of JSON; rank -1: all of them."""

    request: int
    job: int
    first: int
    last: int
    rank: int = -1


class ReadTrace(AgentFrame, frozen=True, tag=True):
    """Send a piece of the newest trace of a rank; one part answers."""

    request: int
    job: int
    rank: int
    folder: str  # of the run, as its workers named it
    after_ns: int  # older traces are of another request; on the server's clock
    offset: int = 0


class ReadEvidence(AgentFrame, frozen=True, tag=True):
    """Send what ranks here were seen doing when a generation made no more steps, as text."""

    request: int
    job: int
    generation: int  # 0: the last one that was looked at
    rank: int = -1  # -1: of all ranks here


Up = (
    Register
    | Described
    | SetUp
    | AcceptanceNews
    | OrderRefused
    | LogPart
    | ShellOutput
    | NodeRecords
    | NodeSample
    | AgentMessage
)
Down = (
    Welcome
    | Rejected
    | Deliver
    | Signed
    | StartAcceptance
    | StopAcceptance
    | ReadLog
    | StopLog
    | ReadSteps
    | ReadTrace
    | ReadEvidence
    | InspectGang
    | Profile
    | ShellDown
)

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode


class JoinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/join, with the join token as bearer."""

    name: str
    machine: str
    key: str  # public, of the node


class JoinAnswer(Struct, frozen=True, kw_only=True):
    """A token that is good for this node alone, once it has shown that it has its key."""

    token: str
    version: str
    server_key: str  # public; an agent remembers it
    pending: bool = False  # an administrator has yet to let the node in
    protocol: int = PROTOCOL
