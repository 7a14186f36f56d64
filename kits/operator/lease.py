"""The Lease that one operator holds to work, by the leader election of the Kubernetes client."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from kubernetes import client
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

from partway.operator.cluster import Timed
from partway.operator.watch import reason_of

logger = logging.getLogger("partway.operator")
_DURATION, _DEADLINE, _RETRY = 15, 10, 2  # seconds: of the lease, to renew it, between two requests


class _Lock:
    """The Lease in the form that leader election needs. An API server that does not answer is a failure like any other
    here; the client's own lock lets the exception through, which ends the thread of the election."""

    def __init__(self, name: str, namespace: str, identity: str) -> None:
        self.name, self.namespace, self.identity = name, namespace, identity
        self._lock = LeaseLock(name, namespace, identity)
        self._lock.api_instance = cast(Any, Timed(client.CoordinationV1Api(), _DEADLINE / 2))
        self.trouble = "not asked for yet"

    def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """Whether it exists, and its record or the error."""
        found: Any
        try:
            there, found = self._lock.get(name, namespace)
        except Exception as error:
            self.trouble = reason_of(error)
            return False, client.ApiException(reason=self.trouble)
        self.trouble = "" if there or found.status == 404 else reason_of(found)
        return there, found

    def create(self, name: str, namespace: str, election_record: Any) -> bool:
        """Create it, and return whether that succeeded."""
        return self._tried("made", partial(self._lock.create, name, namespace, election_record))

    def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        """Write it, and return whether that succeeded."""
        return self._tried("written", partial(self._lock.update, name, namespace, updated_record))

    def _tried(self, what: str, method: Callable[[], bool]) -> bool:
        try:
            done = method()
        except Exception as error:
            logger.debug("%s", reason_of(error))
            done = False
        if not done:
            self.trouble = f"it could not be {what}"
        return done


class Lease:
    """The candidacy of this process for a Lease. It ends the process when it loses the lease, since another one works
    then.

    name    NAMESPACE/NAME
    held    is called once this process holds it, from a thread
    """

    def __init__(self, name: str, held: Callable[[], object]) -> None:
        self._name, self._held = name, held
        namespace, _, own = name.rpartition("/")
        self._lock = _Lock(own, namespace or "default", f"{socket.gethostname()}-{secrets.token_hex(4)}")
        self._config = electionconfig.Config(
            self._lock,
            lease_duration=_DURATION,
            renew_deadline=_DEADLINE,
            retry_period=_RETRY,
            onstarted_leading=self._begin,
            onstopped_leading=self._lose,
        )

    @property
    def trouble(self) -> str:
        """Why the holder of the lease is unknown; "" if it is known."""
        return self._lock.trouble and f"lease {self._name}: {self._lock.trouble}"

    def start(self) -> None:
        """Try to hold it, from now on."""
        election = leaderelection.LeaderElection(self._config)
        threading.Thread(target=election.run, name="partway lease", daemon=True).start()

    def _begin(self) -> None:
        logger.info("%s holds the lease %s", self._lock.identity, self._name)
        self._held()

    def _lose(self) -> None:
        logger.error("%s no longer holds the lease %s, and ends", self._lock.identity, self._name)
        os._exit(1)
