"""uvicorn's server, with an end in two steps."""

import uvicorn


class Server(uvicorn.Server):
    """The first signal lets running answers end, a second one does not. signal: the first one, or None."""

    def __init__(self, app, engine_thread, grace, is_verbose=False):
        """app, engine_thread: of make_app. grace: seconds. is_verbose: requests are logged."""
        super().__init__(uvicorn.Config(
            app, ws="none", lifespan="on", server_header=False, timeout_graceful_shutdown=5,
            log_level="info" if is_verbose else "warning",
        ))  # fmt: skip
        self._engine_thread, self._grace, self.signal = engine_thread, grace, None

    def handle_exit(self, sig, frame):
        """A signal came. What uvicorn's own does, later: while answers end, /health says that it stops."""
        is_second, self.signal = self.signal is not None, self.signal or sig
        self._engine_thread.stop_soon(0 if is_second else self._grace, self._leave)

    def _leave(self):
        self.should_exit = True
