"""What a session was opened with, beside what it stands on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionTerms:
    """error_max: of queries that name nothing, None for the configuration's. salt: what the session was found by beside its
    tokens, and is stored under. expected_tokens: how many it will ask for, None where nobody knows."""

    error_max: float | None = None
    salt: str = ""
    expected_tokens: int | None = None


NO_TERMS = SessionTerms()
