// Launching a planned kernel.
#include "kernel.h"

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <memory>
#include <stdexcept>

namespace emulator {

namespace {

// PyTorch adds a C++ backtrace below the message of its exceptions.
std::string message_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

// MKL's vector functions, which compute these for PyTorch, get ready in the first call of each. Where two threads make
// that at once, what one of them computes has half of its digits. One element is one thread's.
bool get_ready() {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor one = at::full({1}, 0.5, type);
    for (const auto& function : {at::acos, at::asin, at::atan, at::cos, at::erf, at::erfc, at::exp, at::expm1, at::log,
                                 at::log10, at::log1p, at::log2, at::rsqrt, at::sin, at::sqrt, at::tan, at::tanh}) {
      function(one);
    }
  }
  return true;
}

bool fails(const std::function<void()>& work) {
  try {
    work();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

at::Tensor blank(const at::Tensor& like) {
  if (!like.defined()) return like;
  at::Tensor made = at::empty_strided(like.sizes(), like.strides(), like.options());
  std::memset(made.mutable_data_ptr(), 0, made.storage().nbytes());
  return made;
}

std::vector<at::Tensor> blank(const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& each : like) made.push_back(blank(each));
  return made;
}

at::Tensor without_data(const at::Tensor& like) {
  if (!like.defined()) return like;
  return at::detail::empty_strided_meta(like.sizes(), like.strides(), like.options().device(at::kMeta));
}

std::vector<at::Tensor> without_data(const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& each : like) made.push_back(without_data(each));
  return made;
}

void run_kernel(const std::function<void()>& work, const std::function<void()>& rehearsal) {
  const c10::DispatchKeySet modes = c10::DispatchKeySet({c10::DispatchKey::Python,
                                                         c10::DispatchKey::PythonTLSSnapshot,
                                                         c10::DispatchKey::PythonDispatcher}) |
                                    c10::autocast_dispatch_keyset;
  c10::impl::ExcludeDispatchKeyGuard no_modes(modes);
  c10::InferenceMode no_autograd;
  at::RecordFunctionGuard not_recorded(false);
  [[maybe_unused]] static const bool ready = get_ready();
  try {
    work();
  } catch (const std::exception& error) {
    if (fails(rehearsal)) throw Refusal(message_of(error));
    throw std::runtime_error(message_of(error));
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
