// Tells the race detector of CPU operators on pinned memory: torch runs them without any call to the runtime.
#include "../kernels/ranges.h"
#include "../runtime/operation.h"

#include <ATen/core/alias_info.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <unordered_set>

namespace emulator {
namespace {

// Those that do not take a tensor for its shape alone.
bool looks_at_contents(const std::string& name) {
  static const std::unordered_set<std::string> others{
      "aten::dim",         "aten::empty_like", "aten::full_like",    "aten::is_pinned",  "aten::is_same_size",
      "aten::is_set_to",   "aten::new_empty",  "aten::new_full",     "aten::new_ones",   "aten::new_empty_strided",
      "aten::new_zeros",   "aten::numel",      "aten::ones_like",    "aten::rand_like",  "aten::randn_like",
      "aten::result_type", "aten::set_",       "aten::size",         "aten::stride",     "aten::sym_numel",
      "aten::sym_size",    "aten::sym_stride", "aten::zeros_like",   "aten::resize_",    "aten::sym_storage_offset"};
  return !others.contains(name);
}

bool writes(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

bool gives_a_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !writes(result.alias_info());
  });
}

bool is_on_a_device(const at::Tensor& tensor) { return tensor.defined() && !tensor.is_cpu(); }

// What an operator does that has a tensor on a device, the runtime sees.
bool is_of_the_host(const c10::IValue& value) {
  if (value.isTensor()) return !is_on_a_device(value.toTensor());
  if (!value.isTensorList()) return true;
  const std::vector<at::Tensor> tensors = value.toTensorVector();
  return std::none_of(tensors.begin(), tensors.end(), is_on_a_device);
}

void note(const char* name, const at::Tensor& tensor, bool written) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return;
  for (const Range& range : ranges(tensor)) host_uses_pinned(name, range, written);
}

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& record) {
  const auto schema = record.operator_schema();
  if (!schema || gives_a_view(*schema) || !looks_at_contents(schema->name())) return nullptr;
  const auto inputs = record.inputs();
  if (!std::all_of(inputs.begin(), inputs.end(), is_of_the_host)) return nullptr;
  for (size_t i = 0; i < std::min(inputs.size(), schema->arguments().size()); ++i) {
    const bool written = writes(schema->arguments()[i].alias_info());
    if (inputs[i].isTensor()) note(record.name(), inputs[i].toTensor(), written);
    if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) note(record.name(), tensor, written);
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace emulator

// To be called once.
ACL_EXPORT void ascend_emulator_watch_host_operators() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(emulator::operator_begins).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
