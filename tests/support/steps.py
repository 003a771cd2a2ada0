"""One step of an executor, from launch to result."""

from __future__ import annotations

from twinpool.engine.plan import Executor, OnLayers, StepPlan, StepResult


def run_step(executor: Executor, plan: StepPlan, layer_groups: int, on_layers: OnLayers | None) -> StepResult:
    executor.launch(plan, layer_groups, on_layers)
    return executor.collect()
