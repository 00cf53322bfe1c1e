"""`ModelParallelizer`: the hooks a sidecar overrides, and the order of the dense path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from shardwalk.mesh import (
    ActivationCheckpointingScope,
    FrozenMultimodalSharding,
    MeshContext,
    get_fsdp_dp_mesh,
    get_submesh,
    normalize_activation_checkpointing,
)
from shardwalk.parallelizer_core.activation_checkpointing import (
    apply_activation_checkpointing,
    refuse_checkpointing,
)
from shardwalk.parallelizer_core.compile import compile_blocks
from shardwalk.parallelizer_core.fsdp2.dtype_units import shard_unit
from shardwalk.parallelizer_core.fsdp2.embeddings import untied_trainable_tables
from shardwalk.parallelizer_core.fsdp2.multimodal import refuse_frozen_sharding
from shardwalk.parallelizer_core.fsdp2.options import apply_arguments
from shardwalk.parallelizer_core.fsdp2.walk import UnitOptions, walk_dense
from shardwalk.parallelizer_core.plugins import expert_parallel_provider
from shardwalk.parallelizer_core.refusals import (
    refuse_async_tensor_parallel,
    refuse_compiled_tensor_parallel,
)
from shardwalk.parallelizer_core.start_values import check_equal_start
from shardwalk.parallelizer_core.tensor_parallel.parallelize import (
    describe_plan,
    parallelize_tensors,
    plan_tensors,
)
from shardwalk.parallelizer_core.tensor_parallel.validation import (
    validate_tp_sizes,
)


class ModelParallelizer:
    """The sidecar contract: how one model class is parallelized.

    A model class carries an instance as its class attribute `parallelizer`, or it is registered
    with `register_parallelizer`. The base class serves any model; a subclass overrides the hooks
    that its model needs otherwise. It holds no state of a model, so one instance serves all.
    """

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /) -> nn.Module:
        """Apply every parallelism `mesh_context` asks for and return the model to train.

        The model is changed in place; under DDP the returned module is its wrapper.
        """
        # The strategy switch calls back into this class, so the class can only look it up when it
        # is called.
        from shardwalk.parallelizer_core.model_parallelizer import _apply_model_parallelizer

        return _apply_model_parallelizer(self, model, mesh_context)

    def _apply(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool | str = False,
        tp_shard_plan: dict[str, ParallelStyle] | str | None = None,
        dp_replicate_mesh_name: str = "dp_replicate",
        dp_shard_cp_mesh_name: str = "dp_shard_cp",
        tp_mesh_name: str = "tp",
        enable_async_tensor_parallel: bool = False,
        enable_compile: bool = False,
        enable_fsdp2_prefetch: bool = True,
        fsdp2_backward_prefetch_depth: int = 2,
        fsdp2_forward_prefetch_depth: int = 1,
        reshard_after_forward: bool | None = None,
        activation_checkpointing_scope: ActivationCheckpointingScope | None = "all",
        frozen_multimodal_sharding: FrozenMultimodalSharding = "root",
        reapply_trainability: Callable[[nn.Module], None] | None = None,
    ) -> nn.Module:
        """Apply the dense path: tensor parallelism, checkpointing, data-parallel units.

        What cannot work is refused first; then the ranks compare what they start from
        (`check_equal_start`), which an override that does not come back here does itself.

        Args:
            model: changed in place.
            device_mesh: the root mesh with the axes that the `*_mesh_name` arguments name.
            mp_policy: None is bf16 compute with fp32 reduction.
            sequence_parallel: split hidden states over the sequence between the layers of a block.
            tp_shard_plan: module-path patterns -> styles, or a name or import path of such a plan;
                None is `_tp_plan`, else the plan that the model declares, else the structural one.
            reshard_after_forward: None frees every block but the last of a stack, and none in a
                pipeline stage.
            activation_checkpointing: False, "full" (or True), or "selective".
            activation_checkpointing_scope: which layer groups; None is all of them.
            frozen_multimodal_sharding: as for `_apply_fsdp_sharding`.
            reapply_trainability: called on the model before it is changed, and again before it is
                sharded.

        Raises:
            ValueError: an option that this version does not carry out, named with its value.
        """
        refuse_frozen_sharding(model, frozen_multimodal_sharding)
        activation_checkpointing = normalize_activation_checkpointing(activation_checkpointing)
        refuse_checkpointing(model, activation_checkpointing, activation_checkpointing_scope)
        tp_mesh = _axis(device_mesh, tp_mesh_name)
        tp_size = 1 if tp_mesh is None else tp_mesh.size()
        refuse_async_tensor_parallel(
            enable_async_tensor_parallel,
            sequence_parallel=sequence_parallel,
            tp_size=tp_size,
            device_type=device_mesh.device_type,
        )
        refuse_compiled_tensor_parallel(enable_compile, tp_size)
        if tp_mesh is not None and tp_size > 1:
            self._validate_tp_mesh(model, tp_mesh)
        if reapply_trainability is not None:  # a plan leaves frozen towers whole
            reapply_trainability(model)
        plan = plan_tensors(
            model,
            tp_size,
            requested=tp_shard_plan,
            sequence_parallel=sequence_parallel,
            sidecar=self,
            sidecar_plan=self._tp_plan,
        )
        check_equal_start(
            model,
            device_mesh,
            {
                "tp_plan": describe_plan(plan),
                "activation_checkpointing": activation_checkpointing,
                "activation_checkpointing_scope": activation_checkpointing_scope,
                "frozen_multimodal_sharding": frozen_multimodal_sharding,
                "mp_policy": mp_policy,
                "reshard_after_forward": reshard_after_forward,
            },
        )
        if tp_mesh is not None and plan:
            parallelize_tensors(model, tp_mesh, plan)
        apply_activation_checkpointing(
            model,
            activation_checkpointing,
            whole_layers=self._use_full_layer_activation_checkpointing(model),
            scope=activation_checkpointing_scope,
        )
        if reapply_trainability is not None:
            reapply_trainability(model)
        pp_mesh = _axis(device_mesh, "pp")
        if reshard_after_forward is None and pp_mesh is not None and pp_mesh.size() > 1:
            reshard_after_forward = False
        self._apply_fsdp_sharding(
            model,
            get_fsdp_dp_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name),
            mp_policy,
            offload_policy,
            enable_fsdp2_prefetch=enable_fsdp2_prefetch,
            fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
            fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
            reshard_after_forward=reshard_after_forward,
            frozen_multimodal_sharding=frozen_multimodal_sharding,
        )
        if enable_compile:
            compile_blocks(model)
        return model

    def _apply_moe(self, model: nn.Module, mesh_context: MeshContext) -> nn.Module:
        """Apply the expert-parallel walk of the one installed package that provides it.

        Raises:
            MissingExpertParallelError: (an ImportError) none is installed; it says what to install.
            ValueError: as in `_validate_tp_mesh`.
        """
        provider = expert_parallel_provider()
        mesh = mesh_context.device_mesh
        if mesh is not None:
            tp_mesh = _axis(mesh, "tp")
            if tp_mesh is not None and tp_mesh.size() > 1:
                self._validate_tp_mesh(model, tp_mesh)
            check_equal_start(model, mesh)
        return provider(model, mesh_context, self)

    def _apply_unsharded(self, model: nn.Module, mesh_context: MeshContext) -> nn.Module:
        """Apply the dense path over a mesh of one data-parallel rank.

        The walk is the same, so that precision, offload and every other option mean what they mean
        on more.
        """
        assert mesh_context.device_mesh is not None
        return self._apply(model, mesh_context.device_mesh, **apply_arguments(mesh_context))

    def _apply_fsdp_sharding(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None = None,
        enable_fsdp2_prefetch: bool = True,
        fsdp2_backward_prefetch_depth: int = 2,
        fsdp2_forward_prefetch_depth: int = 1,
        reshard_after_forward: bool | None = None,
        frozen_multimodal_sharding: FrozenMultimodalSharding = "root",
        ignored_multimodal_params: set[nn.Parameter] | None = None,
    ) -> None:
        """Turn `module` into FSDP2 units over `mesh`: blocks, embedding tables, root.

        Override it to group parameters otherwise; override `_fully_shard_module` to change what
        every unit is made with.

        Args:
            module: the model, or the part a pipeline stage holds.
            mesh: 1-D (sharded) or 2-D (replicated, sharded).
            reshard_after_forward: True or False for every unit; None frees all blocks but the last
                of a stack.
            frozen_multimodal_sharding: where frozen vision and audio towers go: "root" into the
                root unit, "per_layer" into units of their blocks, which every rank must then run or
                skip alike, "replicate" into none: each rank has all of them.
            ignored_multimodal_params: frozen parameters that stay whole on every rank and out of
                every unit, beside those of `frozen_multimodal_sharding`.
        """
        options = UnitOptions(
            mesh=mesh,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=ignored_multimodal_params or set(),
        )
        walk_dense(
            module,
            options,
            door=self._fully_shard_module,
            embedding_pass=self._fully_shard_untied_input_output_embeddings,
            frozen_sharding=frozen_multimodal_sharding,
            forward_prefetch_depth=fsdp2_forward_prefetch_depth if enable_fsdp2_prefetch else 0,
            backward_prefetch_depth=fsdp2_backward_prefetch_depth if enable_fsdp2_prefetch else 0,
        )

    def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Make one unit of `module`: the single door through which every unit goes.

        Args:
            module: a block, an embedding, a head, a part of a block or the root; never a list.
            kwargs: those of torch's `fully_shard`.
        """
        return shard_unit(module, self._fully_shard_module, **kwargs)

    def _fully_shard_untied_input_output_embeddings(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None,
        input_reshard_after_forward: bool,
    ) -> None:
        """Give each trainable, untied embedding table outside the blocks a unit of its own.

        In the root unit the gradients of both tables would be reduced in one buffer; apart, the
        buffer is bounded by the larger table. Tied tables stay in the root with what they are tied
        to, frozen ones have no gradient to reduce, and a table that is a unit already keeps its
        policy. A head stays gathered after its forward, because the backward starts with it.
        """
        options = UnitOptions(mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
        for table, is_head in untied_trainable_tables(model):
            reshard = input_reshard_after_forward and not is_head
            self._fully_shard_module(table, **options.for_unit(reshard_after_forward=reshard))

    def _use_full_layer_activation_checkpointing(self, model: nn.Module) -> bool:
        """Whether "full" recomputes whole blocks of this model; else their parts one by one."""
        return True

    def _validate_tp_mesh(self, model: nn.Module, tp_mesh: DeviceMesh) -> None:
        """Refuse a tensor-parallel mesh that this model cannot be split over, whatever its plan.

        The base class refuses nothing here. Head counts and feature sizes are checked against the
        plan, wherever it came from, by `_validate_tp_sizes`, adapters and dropout after that.

        Raises:
            ValueError: names the module and the way out.
        """

    def _validate_tp_sizes(
        self, model: nn.Module, tp_size: int, plan: Mapping[str, tuple[ParallelStyle, ...]]
    ) -> None:
        """Refuse a plan whose cuts do not come out even over `tp_size` ranks.

        The base class checks heads and key-value heads, the components and units of fused layers,
        inner features, bare parameters, and that every rank holds a row of each vocabulary.

        Args:
            plan: module path -> styles, wherever it came from.

        Raises:
            ValueError: names tp_size, the number and what it counts, and the sizes that fit.
        """
        validate_tp_sizes(model, tp_size, plan)

    def _tp_plan(self, model: nn.Module, sequence_parallel: bool) -> Mapping[str, Any] | None:
        """The tensor-parallel plan of this model, for when none is requested.

        Returns:
            Module-path patterns (`layers.*.attention.wq`) -> a ParallelStyle or a tuple of them;
            None for the plan that the model declares itself, or the structural default.
        """
        return None


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    return get_submesh(mesh, name) if name in (mesh.mesh_dim_names or ()) else None
