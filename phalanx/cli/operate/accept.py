"""``phalanx doctor accept``: a burn-in of nodes, and a signed certificate of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on, exit_on_config_error, print_json

if TYPE_CHECKING:
    from phalanx.doctor.acceptance.certificate import Certificate, SignedCertificate
    from phalanx.doctor.acceptance.report import AcceptanceRequest

NOT_ACCEPTED = 1  # exit code
SHOWN_RANKS = 5  # nodes of a load; stragglers are always shown
MOST_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, kw_only=True)
class AcceptCommand:
    """What ``phalanx doctor accept`` is asked for."""

    minutes: Annotated[
        float, typer.Option(min=0.02, max=MOST_MINUTES, help="How long all loads run together.")
    ] = 30.0
    load: Annotated[
        list[str] | None,
        typer.Option(help="Only this load: gemm, memory, collective, disk (repeatable)."),
    ] = None
    dcgm: Annotated[
        int,
        typer.Option(min=0, max=4, help="Level of `dcgmi diag`, run before the loads; 0: none."),
    ] = 0
    folder: Annotated[
        Path | None,
        typer.Option(help="Where this machine's disk is written (default: here)."),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for certificates: acceptance-NODE.json.")] = (
        Path()
    )

    def wanted(self, node: str = "") -> AcceptanceRequest:
        """The burn-in; a mistake in an option ends the command."""
        from phalanx.doctor.acceptance.report import LOADS, AcceptanceRequest
        from phalanx.doctor.node import default_folder

        for name in self.load or ():
            if name not in LOADS:
                raise typer.BadParameter(f"--load {name!r}: one of {', '.join(LOADS)}")
        folder = (self.folder or default_folder()).absolute()
        for path in (folder, self.out):
            if not path.is_dir():
                raise typer.BadParameter(f"{path} is no folder")
        return AcceptanceRequest(
            node=node,
            folder=str(folder),
            seconds=self.minutes * 60,
            loads=tuple(name for name in LOADS if not self.load or name in self.load),
            dcgm_level=self.dcgm,
        )


@takes_options
def accept(
    command: AcceptCommand,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check the signature of a certificate; load nothing."),
    ] = None,
    key: Annotated[
        str, typer.Option(help="With --verify: fingerprint of the key that must have signed it.")
    ] = "",
    agent_state: Annotated[
        Path | None,
        typer.Option(help="State folder of this machine's agent, whose key signs."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="A node of a cluster, by its agent (repeatable)."),
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Burn a node in: GEMM, memory, collectives and disk at once, watching heat and errors.

    This machine, or with --node nodes of a cluster: they are drained before, and work again when
    they are accepted. Exit code 0: accepted, 1: not, or a certificate that was changed.
    """
    from phalanx.train.rank.threads import keep_single_threaded

    if verify is not None:
        _verify(verify, key, json)
        return
    if key:
        raise typer.BadParameter("--key is for --verify")
    if node and (agent_state or command.folder):
        raise typer.BadParameter("--agent-state and --folder are of this machine, not of --node")
    keep_single_threaded()  # loads are forked
    from phalanx.control.client.acceptance import accept_here, accept_nodes, write_certificate

    results: dict[str, SignedCertificate | str]
    with exit_on_config_error(json), exit_on(OSError):
        request = command.wanted()
        if node:
            with connected(server, json, state) as client:
                results = dict(accept_nodes(client, node, request, _progress))
        else:
            signed, made = accept_here(request, agent_state, _progress)
            results = {made.node: signed}
        written = {
            name: write_certificate(command.out, name, result)
            for name, result in results.items()
            if not isinstance(result, str)
        }
    if json:
        print_json(results)
    if not _shown(results, written, json):
        raise typer.Exit(NOT_ACCEPTED)


def _shown(
    results: dict[str, SignedCertificate | str], written: dict[str, Path], json: bool
) -> bool:
    """Say what came of every node; whether all were accepted."""
    import msgspec

    from phalanx.cli.tables import plain
    from phalanx.doctor.acceptance.certificate import Certificate

    certificates: list[Certificate] = []
    for name, result in results.items():
        if isinstance(result, str):
            print(plain(f"{name}: {result}"), file=sys.stderr)
            continue
        made = msgspec.json.decode(result.certificate, type=Certificate)
        certificates.append(made)
        if not json:
            _show(made)
            print(f"certificate: {written[name]}")
    if not json and len(certificates) > 1:
        _show_ranking(certificates)
    accepted = [made for made in certificates if made.outcome == "accepted"]
    return len(accepted) == len(results)


def _show_ranking(certificates: list[Certificate]) -> None:
    from phalanx.control.client.acceptance import rank_nodes

    print("\nslowest nodes by load, of the middle of all:")
    for load, ranked in rank_nodes(certificates).items():
        shown = [
            f"{each.name} {each.share:.0%}{' SLOW' if each.slow else ''}"
            for each in ranked
            if each.slow or each in ranked[:SHOWN_RANKS]
        ]
        print(f"{load:20}{', '.join(shown)}")


def _verify(path: Path, key: str, json: bool) -> None:
    from datetime import UTC, datetime

    from phalanx.control.trust.acceptance_signature import verify_certificate
    from phalanx.control.trust.node_key import fingerprint
    from phalanx.doctor.acceptance.certificate import InvalidCertificateError, read_signed

    if not path.is_file():
        raise typer.BadParameter(f"--verify {path}: no such file")
    with exit_on(InvalidCertificateError, OSError):
        data = path.read_bytes()
        made = verify_certificate(data, key)
        signer = fingerprint(read_signed(data)[0].key)
    if json:
        print_json({"valid": True, "signed_by": signer, "certificate": made})
        return
    when = datetime.fromtimestamp(made.time_ns / 1e9, UTC)
    print(f"{path}: as it was signed by {signer} (node key {made.node_key})")
    print(
        f"it says of {made.node} on {when:%Y-%m-%d %H:%M} UTC: {made.outcome} after "
        f"{made.report.seconds:.0f} of {made.report.wanted_seconds:.0f} s; "
        f"{len(made.report.loads)} loads, {len(made.setup.versions)} versions, "
        f"{len(made.setup.settings)} settings, {len(made.description.facts)} facts"
    )
    if not key:
        print("whose key that is, this does not tell: compare it with the node's, or give --key")


def _progress(line: str) -> None:
    from phalanx.cli.tables import plain

    print(plain(line), file=sys.stderr)


def _show(made: Certificate) -> None:
    from phalanx.cli.operate.finding_lines import show_finding

    for finding in made.report.findings:
        show_finding(finding)
    seconds = f"{made.report.seconds:.0f} of {made.report.wanted_seconds:.0f} s"
    print(f"\n{made.node}: {made.outcome} after {seconds} under load")
