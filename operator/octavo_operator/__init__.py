"""The operator: turns an `LLMDeployment` into pods, services and a rollout.

Not built yet. It will be kopf as event source, one keyed queue, and a level-triggered reconcile
over pure `spec -> desired -> plan` functions; `docs/architecture.md` says how it fits. It may
import `octavo_engine.protocol` and nothing else of the engine.
"""
