"""The engine over HTTP: the specification's control endpoints, OpenAI's images and chat, live events."""
