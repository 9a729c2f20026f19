"""Compiles parts of kernels as far as LLVM's intermediate representation (IR); the kernels make machine code of it.

By itself numba makes machine code of each function. A caller links the IR of what it calls, and nothing runs the
machine code of a part. Without it, kernels take a tenth less time to compile, and are the same. The IR of a part is
optimised as before: if it is not until it is in a kernel, linear layers of 32 rows take 3 to 7 % longer.

The section "Customizing the compiler" of numba's manual says how to change its pipeline. The class of a function's
library is internal to numba: setup.cfg names the versions with which this works.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# numba has no types.

from __future__ import annotations

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _IRLibrary(JITCodeLibrary):
    """The optimised IR of a function."""

    def _finalize_final_module(self):
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringToIR(NativeLowering):
    _name = "lowering_to_ir"

    def run_pass(self, state):
        state.library = _IRLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        # numba finds the compiled function by what Python would call, which has to be a function written in C. Each
        # object has one of its own, which does nothing but refuse its arguments.
        never_called = object().__format__
        state.targetctx.insert_user_function(never_called, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=never_called)
        return True


class PartCompiler(CompilerBase):
    """For `njit(pipeline_class=...)`: a function that only compiled functions call."""

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LoweringToIR if each is NativeLowering else each, told) for each, told in passes.passes]
        passes.finalize()
        return [passes]
