"""The parts of the torch engine: policy, accounting, record, execution, and the step."""
