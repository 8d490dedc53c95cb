"""What a tenant calls its contexts, and how they are called in the database."""

import hashlib
import hmac
from dataclasses import replace
from functools import cached_property

import kvdb.validate as validate
from kvdb.errors import InvalidArgument
from kvdb.types import ContextInfo

SEPARATOR = "/"


class Names:
    """The names and salts of one tenant. Its contexts are TENANT/NAME, and are found under a salt that is its own, so that
    nothing of it is ever the prefix or the chunk of another's."""

    def __init__(self, tenant: str) -> None:
        self.prefix = f"{tenant}{SEPARATOR}"
        self._tenant = tenant

    def inner(self, name: str) -> str:
        """The name in the database. Raises InvalidArgument for what is no name."""
        room = validate.NAME_LENGTH_MAX - len(self.prefix)
        if len(validate.name(name)) > room:
            raise InvalidArgument(f"a context's name has {len(name)} characters; expected at most {room} for this tenant")
        return self.prefix + name

    def outer(self, name: str) -> str:
        """The name as the tenant knows it."""
        return name.removeprefix(self.prefix)

    def salt(self, given: str) -> str:
        """The salt in the database of what the tenant calls so, "" for none. Raises InvalidArgument."""
        room = validate.NAME_LENGTH_MAX - len(self._salt)
        if len(validate.salt(given)) > room:
            raise InvalidArgument(f"salt has {len(given)} characters; expected at most {room}, such as a hash of it")
        return self._salt + given

    def info(self, info: ContextInfo) -> ContextInfo:
        """What is known of a context, as the tenant is told it."""
        return replace(info, name=self.outer(info.name), salt=info.salt.removeprefix(self._salt))

    @cached_property
    def _salt(self) -> str:
        return hmac.new(self._tenant.encode(), b"kvdb tenant", hashlib.sha256).hexdigest() + SEPARATOR
