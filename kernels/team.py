"""Kernels run on torch's own threads.

numba's parallel loops bring a pool of threads of their own. Beside torch's pool that is one pool too many: idle
OpenMP threads spin for a while before they sleep, so on two cores each pool's workers keep the other's from running
(measured on two cores: a step of 8 decodes takes 74 ms alone and 3 s when a third thread is busy). `run_team` calls
the OpenMP runtime that torch has loaded, as compiled C code would: one pool, and a launch costs 1.3 microseconds.

`run_team(work, args, workers)` is for use in compiled functions. It calls `work(worker, args)` for each worker from
0 to `workers` - 1, on as many threads; `args` is a tuple. It returns when all are done. `work` must not raise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic


def _find_openmp() -> bool:
    """Make torch's OpenMP runtime known to compiled code; False where torch has another kind of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if binding.address_of_symbol("GOMP_parallel") is None and bundled:
        binding.load_library_permanently(str(bundled[0]))
    return binding.address_of_symbol("GOMP_parallel") is not None


cgutils: Any = untyped_cgutils
HAS_TEAM = _find_openmp()


def team_size() -> int:
    """Threads that kernels run on: torch's, or one where torch's cannot be used."""
    return torch.get_num_threads() if HAS_TEAM else 1


@intrinsic
def run_team(typing_context: Any, work: Any, args: Any, workers: Any) -> Any:
    """See the module. The call is written out as what a C compiler makes of `#pragma omp parallel`."""
    inner = (types.intp, args)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        work.dispatcher.compile(inner)
        compiled = work.dispatcher.overloads[inner]
        context.active_code_library.add_linking_library(compiled.library)
        module, pointer, int32 = builder.module, ir.IntType(8).as_pointer(), ir.IntType(32)
        thread = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), module.get_unique_name("team"))
        thread.linkage = "internal"
        inside = ir.IRBuilder(thread.append_basic_block("entry"))
        shared = inside.load(inside.bitcast(thread.args[0], context.get_value_type(args).as_pointer()))
        number = cgutils.get_or_insert_function(module, ir.FunctionType(int32, []), "omp_get_thread_num")
        worker = inside.sext(inside.call(number, []), context.get_value_type(types.intp))
        function = context.declare_function(module, compiled.fndesc)
        context.call_conv.call_function(inside, function, types.none, inner, (worker, shared))
        inside.ret_void()
        memory = builder.bitcast(cgutils.alloca_once_value(builder, values[1]), pointer)
        count = builder.trunc(values[2], int32)
        if HAS_TEAM:
            kind = ir.FunctionType(ir.VoidType(), [thread.type, pointer, int32, int32])
            fork = cgutils.get_or_insert_function(module, kind, "GOMP_parallel")
            builder.call(fork, [thread, memory, count, ir.Constant(int32, 0)])
        else:
            context.call_conv.call_function(
                builder, function, types.none, inner, (ir.Constant(context.get_value_type(types.intp), 0), values[1])
            )
        return context.get_dummy_value()

    return types.void(work, args, workers), generate
