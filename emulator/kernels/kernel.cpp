// Launching a planned kernel.
#include "kernel.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <stdexcept>

namespace emulator {

void run_without_modes(const std::function<void()>& work) {
  const c10::DispatchKeySet modes = c10::DispatchKeySet({c10::DispatchKey::Python,
                                                         c10::DispatchKey::PythonTLSSnapshot,
                                                         c10::DispatchKey::PythonDispatcher}) |
                                    c10::autocast_dispatch_keyset;
  c10::impl::ExcludeDispatchKeyGuard no_modes(modes);
  c10::InferenceMode no_autograd;
  at::RecordFunctionGuard not_recorded(false);
  try {
    work();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

aclError launch(aclOpExecutor* executor, aclrtStream stream) {
  std::unique_ptr<aclOpExecutor> owned(executor);
  return submit(stream, std::move(owned->operation));
}

}  // namespace emulator

ACL_EXPORT aclError aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return ACL_SUCCESS;
}
