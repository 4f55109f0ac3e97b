"""Pure decisions: plan, rollout, canary, autoscaling, readiness gates."""
