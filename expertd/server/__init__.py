"""The HTTP face of the daemon: an ASGI app that speaks OpenAI's, Anthropic's and llama-server's shapes.

`app` puts the routes together, `run` listens, `contract` is what the floor below must offer. The model runs elsewhere
(`runtime.service`); here is text in, JSON out.
"""
