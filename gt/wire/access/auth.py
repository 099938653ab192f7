"""Access to a server: which mechanism a port speaks, and what a peer shows to be let in. Knows no socket and no file.

On loopback a server speaks PLAIN. It draws a new secret at each start and keeps it in a file of its user (`runtime`). The wire
carries only a keyed hash of it. Elsewhere a server speaks CURVE, with keys that both sides derive from their token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
from dataclasses import asdict, dataclass
from functools import lru_cache

from gt.errors import Refused

PLAIN, CURVE, NULL = "PLAIN", "CURVE", "NULL"
MADE = "start-"  # how secrets begin that a server makes for one start
MIN_TOKEN_CHARACTERS = 20  # characters of a token that nobody guesses
USER = b"gt"
_SALT, _COST, _BLOCK = b"gt wire keys, version 1", 1 << 15, 8  # scrypt's parameters: 32 MiB and about 0.1 s a guess


@dataclass(frozen=True)
class Access:
    """The rules of one server: token "" is none given; encrypt: CURVE on loopback too; insecure: off loopback without a token.

    secret: of this start, for a server that a program starts for itself; "" makes one.
    """

    token: str = ""
    encrypt: bool = False
    insecure: bool = False
    secret: str = ""


@dataclass(frozen=True)
class AccessEntry:
    """A port's mechanism, and its secret: the text of a runtime file.

    given: whether people gave the server a token, which clients then need besides. secret: "" where the token is all.
    """

    mechanism: str
    secret: str = ""
    given: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Credentials:
    """Credentials of one side: for PLAIN the password; for CURVE the secret keys of server and clients, of 32 bytes each."""

    mechanism: str
    password: bytes = b""
    server: bytes = b""
    client: bytes = b""


def made() -> str:
    """A secret for one start of a server: 256 random bits."""
    return MADE + secrets.token_hex(32)


def strong() -> str:
    """A token for people to keep: 256 random bits."""
    return secrets.token_urlsafe(32)


def weakness(token: str) -> str:
    """The reason why a token could be guessed, "" if it could not."""
    if token and (len(token) < MIN_TOKEN_CHARACTERS or len(set(token)) < MIN_TOKEN_CHARACTERS // 2):
        number = f"{len(token)} characters, {len(set(token))} different"
        return f"the token has {number}: it can be guessed; `gt key FILE` makes a strong one"
    return ""


def loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_loopback


def entry(access: Access, ip: str, host: str = "") -> AccessEntry:
    """The entry of a server bound to this address. Refused if it would ask for nothing where it is not meant to."""
    if access.token.startswith(MADE):
        raise Refused(f"a token that begins with {MADE} is another server's own: make one with `gt key FILE`")
    has_token = bool(access.token)
    # Off loopback everybody can connect: CURVE with a token, or the owner's explicit word for none.
    if not loopback(ip):
        if has_token:
            return AccessEntry(CURVE, given=True)
        if access.insecure:
            return AccessEntry(NULL)
        raise Refused(
            f"a server on {host or ip} needs a token: set GT_TOKEN or pass --token-file (`gt key FILE` makes one), "
            "or let anybody in with --insecure"
        )

    # On loopback only this host's users can, and the secret of a file of mode 0600 keeps out the other ones.
    if access.encrypt:
        return AccessEntry(CURVE, "" if has_token else access.secret or made(), has_token)
    return AccessEntry(PLAIN, access.secret or made(), has_token)


def read(text: str) -> AccessEntry | None:
    """The entry of a runtime file; None for a text that is none."""
    try:
        row = json.loads(text)
        found = AccessEntry(row["mechanism"], row["secret"], row["given"])
    except (ValueError, KeyError, TypeError):
        return None
    known = found.mechanism in (PLAIN, CURVE, NULL) and type(found.secret) is str and type(found.given) is bool
    return found if known else None


def lock(found: AccessEntry, token: str, ip: str, port: int) -> Credentials:
    """Credentials that the server compares with those that clients show. token: from the server's owner, "" for none."""
    return _credentials_for(found, token, ip, port)


def key(found: AccessEntry | None, token: str, ip: str, port: int) -> Credentials | None:
    """Credentials that a client or worker shows at this address; None while there are none that it could show safely.

    found: of the server's runtime file, if this user has one. Without it, a server's own secret opens that server on loopback.
    Any other token is for CURVE. No token is for a server that lets anybody in; on loopback such a server has a file.
    """
    if found is not None:
        return _credentials_for(found, token, ip, port)
    if loopback(ip) and token.startswith(MADE):
        return _credentials_for(AccessEntry(PLAIN, token), "", ip, port)
    if token:
        return _credentials_for(AccessEntry(CURVE, given=True), token, ip, port)
    return None if loopback(ip) else Credentials(NULL)


def unused(found: AccessEntry, token: str) -> bool:
    """True if somebody gave this side a token that a server does not ask for, so that it proves nothing of that server."""
    return bool(token) and not found.given and not token.startswith(MADE)


def opens(shown: Credentials, mechanism: str, credentials: list[bytes], client: bytes = b"") -> bool:
    """True if ZAP's credentials are those of a key. client: the public key that belongs to its `client`."""
    if mechanism != shown.mechanism:
        return False
    # Comparisons take the same time wherever two texts differ, so that their time tells nothing.
    if mechanism == PLAIN:
        return len(credentials) == 2 and hmac.compare_digest(credentials[1], shown.password)
    if mechanism == CURVE:
        return len(credentials) == 1 and hmac.compare_digest(credentials[0], client)
    return True


def _credentials_for(found: AccessEntry, token: str, ip: str, port: int) -> Credentials:
    """A password holds for one address only: a listener at another learns nothing from it."""
    # HMAC(secret, "gt IP:PORT\0token"): who reads the wire, or listens in the server's place, cannot use it at another address.
    own = token if found.given else ""
    if found.mechanism == PLAIN:
        text = f"gt {ip}:{port}\0{own}".encode("utf-8", "replace")
        return Credentials(PLAIN, hmac.new(found.secret.encode(), text, hashlib.sha256).hexdigest().encode())
    if found.mechanism == CURVE:
        server, client = _derived(own or found.secret)
        return Credentials(CURVE, server=server, client=client)
    return Credentials(NULL)


@lru_cache(maxsize=8)
def _derived(token: str) -> tuple[bytes, bytes]:
    """The secret keys of server and clients: 64 bytes of scrypt(token), salt and costs as above, p = 1."""
    # scrypt makes each guess of a weak token expensive. Cached, since a server asks for each of its addresses.
    both = hashlib.scrypt(
        token.encode("utf-8", "replace"), salt=_SALT, n=_COST, r=_BLOCK, p=1, dklen=64, maxmem=2 * 128 * _COST * _BLOCK
    )
    return both[:32], both[32:]
