"""Compiles kernels of parts, and the parts as far as LLVM's intermediate representation (IR).

By itself numba makes machine code of each function. A caller links the IR of what it calls, and nothing runs the
machine code of a part. Without it, kernels take a tenth less time to compile, and are the same. The IR of a part is
optimised as before: if it is not until it is in a kernel, linear layers of 32 rows take 3 to 7 % longer.

numba links all IR first and then optimises it, so that the same code is optimised once more in each function on the way
to the kernel. Here what is called by its address, or is too large to be inlined, is linked behind the rest, when that
has been optimised. A kernel that another kernel calls is not linked at all (see kernel_symbols.py).

The section "Customizing the compiler" of numba's manual says how to change its pipeline. The class of a function's
library is internal to numba: setup.cfg names the versions with which this works.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# numba has no types.

from __future__ import annotations

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

from handlers.cpu_kernels.compilation.kernel_symbols import entry_of


class _Library(JITCodeLibrary):
    """The IR of a function; what is to be linked behind it, and which kernels it calls, both as ordered sets."""

    def __init__(self, codegen, name):
        super().__init__(codegen, name)
        self.behind, self.kernels = {}, {}

    def add_linking_library(self, library):
        if _is_kernel(library):
            library._ensure_finalized()
            self.kernels[library] = None
        elif isinstance(library, _SeparateLibrary):
            self.link_behind(library)
        else:
            super().add_linking_library(library)
            self._take_over(library)

    def link_behind(self, library):
        """Link a function that is optimised already, and that this one does not inline."""
        library._ensure_finalized()
        self.behind[library] = None
        self._take_over(library)

    def _take_over(self, library):
        if isinstance(library, _Library):
            self.behind |= library.behind
            self.kernels |= library.kernels

    def _optimize_functions(self, ll_module):
        # numba has each function optimised before it is linked as well, for the sake of memory.
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        # numba has cheap passes come first, for counts of references. Kernels have few.
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _IRLibrary(_Library):
    """The optimised IR of a part."""

    def _finalize_final_module(self):
        self._finalized = True


class _SeparateLibrary(_IRLibrary):
    """The optimised IR of a part that its callers do not inline."""


class _KernelLibrary(_Library):
    """A kernel with all its parts."""

    def _optimize_final_module(self):
        super()._optimize_final_module()
        for library in self.behind:
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        for library in self.kernels:
            self._call(library)

    def _call(self, kernel):
        """Call another kernel by the name by which code from disk finds it, too."""
        entry = entry_of(kernel)
        entry.load()
        self._reload_init.add(entry.load)
        self._final_module.get_function(entry.function).name = entry.symbol


def _is_kernel(library):
    is_from_disk = library._disable_inspection  # nothing but kernels is kept there
    return is_from_disk or isinstance(library, _KernelLibrary)


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringToIR(NativeLowering):
    _name = "lowering_to_ir"
    library = _IRLibrary

    def run_pass(self, state):
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        # numba finds the compiled function by what Python would call, which has to be a function written in C. Each
        # object has one of its own, which does nothing but refuse its arguments.
        never_called = object().__format__
        state.targetctx.insert_user_function(never_called, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=never_called)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringToSeparateIR(_LoweringToIR):
    _name = "lowering_to_separate_ir"
    library = _SeparateLibrary


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringToKernel(NativeLowering):
    _name = "lowering_to_kernel"

    def run_pass(self, state):
        state.library = _KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().run_pass(state)


# For closures, and for expressions of whole arrays: kernels have none.
_LEFT_OUT = (InlineClosureLikes, NopythonRewrites)


class _Compiler(CompilerBase):
    lowering = NativeLowering

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (self.lowering if each is NativeLowering else each, told)
            for each, told in passes.passes
            if each not in _LEFT_OUT
        ]
        passes.finalize()
        return [passes]


class PartCompiler(_Compiler):
    """For `njit(pipeline_class=...)`: a function that only compiled functions call."""

    lowering = _LoweringToIR


class SeparatePartCompiler(_Compiler):
    """For `njit(pipeline_class=...)`: as for PartCompiler, and too large to be inlined."""

    lowering = _LoweringToSeparateIR


class KernelCompiler(_Compiler):
    """For `njit(pipeline_class=...)`: a function that Python calls."""

    lowering = _LoweringToKernel
