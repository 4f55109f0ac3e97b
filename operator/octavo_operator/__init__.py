"""The operator: turns an `LLMDeployment` into pods, services and a rollout.

kopf as event source, one keyed queue, and a level-triggered reconcile over pure
`spec -> desired -> plan` functions; `docs/operator.md` says what it does and `docs/architecture.md`
how it fits. It imports `octavo_engine.protocol` and nothing else of the engine.
"""
