"""What users see of an LLMDeployment: status, faults, reasons, Events."""
