"""A virtual environment for each peer, in .venv-peers/ of the checkout, kept between calls."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: what to install, which script of this folder drives it, and how that is started."""

    name: str
    script: str
    pins: tuple[str, ...]
    start: tuple[str, ...] = ("python",)

    @property
    def label(self) -> str:
        """Its name and version."""
        return self.pins[0].replace("==", " ")

    @property
    def folder(self) -> Path:
        """Its environment."""
        return ROOT / ".venv-peers" / self.name

    def install(self) -> None:
        """Makes the environment, unless one with these versions is there."""
        mark = self.folder / ".installed"
        wanted = "\n".join(self.pins)
        if mark.is_file() and mark.read_text() == wanted:
            return
        print(f"{self.name}: installing ...", file=sys.stderr, flush=True)
        pip = self.folder / "bin" / "pip"
        # All pins in one call: a library that asks for torch must not bring another build of it.
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(self.folder)],
            [str(pip), "install", "--quiet", "--disable-pip-version-check", *self.pins],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
        mark.write_text(wanted)

    def command(self, *arguments: str) -> list[str]:
        """What starts the script."""
        program, *options = self.start
        script = Path(__file__).parent / self.script
        return [str(self.folder / "bin" / program), *options, str(script), *arguments]


def peers(processes: int) -> list[Peer]:
    """The libraries; pfl shares its clients among this many processes."""
    torch = ("torch==2.13.0", "numpy==2.4.6")
    old_jax = ("jax==0.4.23", "jaxlib==0.4.23", "dm-haiku==0.0.11", "numpy==1.26.4", "scipy==1.12.0")
    torchrun = ("torchrun", "--standalone", f"--nproc_per_node={processes}")
    return [
        Peer("fluke", "run_fluke.py", ("fluke-fl==0.8.1", "torchvision==0.28.0", *torch)),
        Peer("fedjax", "run_fedjax.py", ("fedjax==0.0.17", *old_jax)),
        Peer("pfl", "run_pfl.py", ("pfl==0.6.0", *torch), torchrun),
        Peer("flower", "run_flower.py", ("flwr==1.41.0", "ray==2.55.1", *torch)),
    ]
