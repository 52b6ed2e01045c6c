"""An OpenAI-compatible server over md.Batch: `minidflash serve`, or app.make_app in any ASGI server."""
