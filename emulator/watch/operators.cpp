// Tells modelled time of all operators that torch calls, also of those that launch nothing, such as views.
#include "../runtime/operation.h"

#include <ATen/record_function.h>

namespace {

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& record) {
  // What else is recorded are torch_npu's own notes of the kernels that an operator launches.
  if (record.operator_name()) emulator::torch_operator_begins();
  return nullptr;
}

}  // namespace

// To be called once. Autograd's nodes count by the operators that they call.
ACL_EXPORT void ascend_emulator_watch_operators() {
  at::addGlobalCallback(at::RecordFunctionCallback(begins).scopes({at::RecordScope::FUNCTION}));
}
