"""What a server measures, as its metrics port tells it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from ssl import SSLContext, create_default_context
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvdb.config import Tls
from kvdb.errors import InvalidArgument, Unauthenticated, Unavailable

Labels = tuple[tuple[str, str], ...]
SECONDS_MAX = 10.0

_sample = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?").fullmatch
_label = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Samples:
    """The values of one moment, by name and labels. A metric that is not there counts as 0."""

    values: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> "Samples":
        """The samples of a page in Prometheus' text form. Raises InvalidArgument for anything else."""
        values = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                found = _sample(line)
                if found is None:
                    raise InvalidArgument(f"{line[:60]!r} is no metric; expected the address of a server's metrics port")
                values[found[1], tuple(sorted(_label.findall(found[2] or "")))] = float(found[3])
        return cls(values)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric, summed over all labels but this one."""
        sums: dict[str, float] = {}
        for (found, labels), value in self.values.items():
            if found == name:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def sum(self, name: str) -> float:
        """The sum of all values of a metric."""
        return sum(value for (found, _), value in self.values.items() if found == name)


def _tls(url: str) -> SSLContext | None:
    ca = Tls.of_environment().ca
    return create_default_context(cafile=ca) if ca and url.startswith("https:") else None


def read(url: str, token: str) -> Samples:
    """Ask the metrics port at `url`, http://host:port, or https with the certificates that KVDB_TLS_CA names. Raises
    InvalidArgument, Unauthenticated or Unavailable."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise InvalidArgument(f"{url} is no address of a metrics port; expected one like http://127.0.0.1:9464")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        asked = Request(f"{url.rstrip('/')}/metrics", headers=headers)  # noqa: S310  # the scheme was checked
        with urlopen(asked, timeout=SECONDS_MAX, context=_tls(url)) as answer:  # noqa: S310
            return Samples.parse(answer.read().decode(errors="replace"))
    except HTTPError as error:
        if error.code == 401:
            raise Unauthenticated("the server asks for its token; pass it as --token or KVDB_TOKEN") from None
        raise Unavailable(f"{url} answered with status {error.code}") from None
    except (URLError, OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise Unavailable(f"no metrics at {url} ({why}); start kvdb serve with --metrics-port") from None
