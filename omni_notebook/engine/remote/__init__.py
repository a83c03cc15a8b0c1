"""An engine on a server, over HTTP: the API of `AsyncOmni`, and of a plain vLLM-Omni server what that has."""
