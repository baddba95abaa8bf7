"""A server of few pages: each caller has a thread; beyond so many they are cut off."""

from __future__ import annotations

import threading
from socketserver import ThreadingMixIn
from typing import Any


class FewCallers(ThreadingMixIn):
    """To be mixed in before a server of sockets; `places` says how many callers at a time."""

    daemon_threads = True  # they end with the process
    allow_reuse_port = False  # a port that another process listens at is not shared with it
    places: threading.Semaphore

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, where there is a place."""
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and leave the place to the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()
