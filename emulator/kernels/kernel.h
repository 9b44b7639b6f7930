// One line makes one CANN operator: its name, the arguments in CANN's order, and the work.
//
//   ACLNN(aclnnMm, (In self, In mat2, Out out, int8_t), at::mm_out(out, self, mat2))
//
// It exports aclnnMmGetWorkspaceSize, which copies the arguments and notes which memory is read and which is
// written, and aclnnMm, which puts the work on a stream. The parameter types say both what CANN passes and
// what the kernel may do with it:
//
//   In, Out              a tensor that is read; one that is written
//   Index                one that is read, and must be of int32 or int64: else the call is refused, as by CANN
//   Update               one that is read and written, in place
//   Ins, Outs, Updates   the same for lists of tensors
//   Number, MaybeNumber  a scalar; one that may be absent
//   Numbers, Integers, Booleans, Text
//   int64_t, double, bool, aclDataType ... stand for themselves
//
// An absent optional tensor is an undefined one. Outputs have their final shape and are never resized.
//
// What CANN refuses when an operator is called, such as shapes that do not broadcast, must be refused then here too: a
// kernel that fails on the stream takes the device with it. ACLNN_AS is for a kernel that is one function of torch
// whose arguments torch checks apart from computing. ACLNN_IF is for any other: its third argument is the check. Both
// take checks from at::meta, and only those of structured functions: the others would compute.
//
//   ACLNN_AS(aclnnMul, (In self, In other, Out out), mul_out(out, self, other))
//   ACLNN_IF(aclnnInplaceMul, (Update self, In other), at::meta::mul_(self, other), self.mul_(other))
//
// What neither refuses fails on the stream, and a rehearsal without its data tells whether that is for good.
//
// For modelled time a kernel moves the bytes of its tensors. ACLNN_OF is for one that does more than that, and
// says what in its third argument, an expression of the same parameters; see work.h here. ACLNN_OF_IF has both.
#pragma once

#include "tensor.h"
#include "work.h"

#include <tuple>

struct aclOpExecutor {
  emulator::Operation operation;
};

namespace emulator {

using In = const at::Tensor&;
using Index = const at::Tensor&&;
using Out = at::Tensor&;
using Update = at::Tensor&&;
using Ins = const std::vector<at::Tensor>&;
using Outs = std::vector<at::Tensor>&;
using Updates = std::vector<at::Tensor>&&;
using Number = const at::Scalar&;
using MaybeNumber = const std::optional<at::Scalar>&;
using Numbers = const std::vector<at::Scalar>&;
using Integers = const std::vector<int64_t>&;
using Booleans = const std::vector<bool>&;
using Text = const std::string&;

// How one parameter type is passed by CANN, and how it is copied to outlive the call.
template <class Parameter>
struct Argument {
  using Acl = Parameter;
  static Parameter copy(Acl argument) { return argument; }
};

template <>
struct Argument<In> {
  using Acl = const aclTensor*;
  static at::Tensor copy(Acl argument) { return tensor(argument); }
};

template <>
struct Argument<Index> : Argument<In> {
  static at::Tensor copy(Acl argument) { return index(argument); }
};

template <>
struct Argument<Out> {
  using Acl = aclTensor*;
  static at::Tensor copy(Acl argument) { return tensor(argument); }
};

template <>
struct Argument<Update> : Argument<Out> {};

template <>
struct Argument<Ins> {
  using Acl = const aclTensorList*;
  static std::vector<at::Tensor> copy(Acl argument) { return tensors(argument); }
};

template <>
struct Argument<Outs> {
  using Acl = aclTensorList*;
  static std::vector<at::Tensor> copy(Acl argument) { return tensors(argument); }
};

template <>
struct Argument<Updates> : Argument<Outs> {};

template <>
struct Argument<Number> {
  using Acl = const aclScalar*;
  static at::Scalar copy(Acl argument) { return scalar(*argument); }
};

template <>
struct Argument<MaybeNumber> {
  using Acl = const aclScalar*;
  static std::optional<at::Scalar> copy(Acl argument) {
    return argument ? std::optional(scalar(*argument)) : std::nullopt;
  }
};

template <>
struct Argument<Numbers> {
  using Acl = const aclScalarList*;
  static std::vector<at::Scalar> copy(Acl argument) {
    std::vector<at::Scalar> values;
    for (const aclScalar* each : argument->scalars) values.push_back(scalar(*each));
    return values;
  }
};

template <>
struct Argument<Integers> {
  using Acl = const aclIntArray*;
  static std::vector<int64_t> copy(Acl argument) {
    return argument ? argument->values : std::vector<int64_t>{};
  }
};

template <>
struct Argument<Booleans> {
  using Acl = const aclBoolArray*;
  static std::vector<bool> copy(Acl argument) { return argument->values; }
};

template <>
struct Argument<Text> {
  using Acl = const char*;
  static std::string copy(Acl argument) { return argument; }
};

template <class Parameter>
constexpr bool is_update = std::is_same_v<Parameter, Update> || std::is_same_v<Parameter, Updates>;

// Notes the memory behind one argument.
template <class Parameter, class Value>
void note_memory(const Value& value, Operation& operation) {
  auto note = [&operation](const at::Tensor& view) {
    constexpr bool written =
        is_update<Parameter> || std::is_same_v<Parameter, Out> || std::is_same_v<Parameter, Outs>;
    for (const Range& range : ranges(view)) (written ? operation.writes : operation.reads).push_back(range);
  };
  if constexpr (std::is_same_v<Value, at::Tensor>) note(value);
  if constexpr (std::is_same_v<Value, std::vector<at::Tensor>>) {
    for (const at::Tensor& view : value) note(view);
  }
}

// How many bytes go to and from the memory behind one argument.
template <class Parameter, class Value>
double traffic(const Value& value) {
  constexpr int times = is_update<Parameter> ? 2 : 1;
  double nbytes = 0;
  if constexpr (std::is_same_v<Value, at::Tensor>) nbytes = bytes_of(value);
  if constexpr (std::is_same_v<Value, std::vector<at::Tensor>>) {
    for (const at::Tensor& view : value) nbytes += bytes_of(view);
  }
  return times * nbytes;
}

// The same argument, but with zeros for data.
at::Tensor blank(const at::Tensor& like);
std::vector<at::Tensor> blank(const std::vector<at::Tensor>& like);
template <class Value>
Value blank(const Value& value) {
  return value;
}

// The same argument with a shape and a dtype only: torch's checks of tensors of several dtypes would convert their data,
// which is not there in a dry run, and not written yet when an operator is called.
at::Tensor without_data(const at::Tensor& like);
std::vector<at::Tensor> without_data(const std::vector<at::Tensor>& like);
template <class Value>
Value without_data(const Value& value) {
  return value;
}

// Keeps whatever thread a stream's work runs on from leaking its own modes (autograd, autocast, Python
// dispatch) into the work. If it fails, the rehearsal tells whether that comes from the data: else CANN would
// have refused the call, and a Refusal is thrown.
void run_kernel(const std::function<void()>& work, const std::function<void()>& rehearsal);

aclError launch(aclOpExecutor* executor, aclrtStream stream);

// Made once for each list of parameters, not for each operator: most of the time that kernels take to compile is here.
template <class... Parameters>
aclError plan(const char* name, Work (*work)(Parameters...), void (*check)(Parameters...),
              void (*run)(Parameters...), uint64_t* workspace_size, aclOpExecutor** executor,
              typename Argument<Parameters>::Acl... arguments) {
  try {
    Operation operation{name, {}, {}, {}};
    // A brace list copies from left to right, and each copy must be noted under its own parameter type.
    std::tuple<decltype(Argument<Parameters>::copy(arguments))...> copies{Argument<Parameters>::copy(arguments)...};
    std::apply(
        [&operation, work, check](auto&... copy) {
          if (check != nullptr) {
            std::tuple<std::decay_t<decltype(copy)>...> shapes{without_data(copy)...};
            std::apply([check](auto&... shape) { check(static_cast<Parameters>(shape)...); }, shapes);
          }
          (note_memory<Parameters>(copy, operation), ...);
          if (!models_time()) return;
          if (work != nullptr) operation.work = work(static_cast<Parameters>(copy)...);
          if (operation.work.nbytes == 0) operation.work.nbytes = (traffic<Parameters>(copy) + ... + 0.0);
        },
        copies);
    operation.body = [] {};
    if (computes()) {
      operation.body = [run, copies = std::move(copies)]() mutable {
        auto run_with = [run](auto& values) {
          std::apply([run](auto&... value) { run(static_cast<Parameters>(value)...); }, values);
        };
        run_kernel([&] { run_with(copies); },
                   [&] {
                     auto blanks = std::apply(
                         [](auto&... copy) { return std::tuple<std::decay_t<decltype(copy)>...>{blank(copy)...}; },
                         copies);
                     run_with(blanks);
                   });
      };
    }
    *workspace_size = 0;
    *executor = new aclOpExecutor{std::move(operation)};
    return ACL_SUCCESS;
  } catch (const c10::Error& error) {
    return fail(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + error.what());
  }
}

template <class Kernel, class Signature = decltype(Kernel::run)>
struct Planner;

template <class Kernel, class... Parameters>
struct Planner<Kernel, void(Parameters...)> {
  static aclError plan(typename Argument<Parameters>::Acl... arguments, uint64_t* workspace_size,
                       aclOpExecutor** executor) {
    Work (*work)(Parameters...) = Kernel::work;    // nullptr, most often
    void (*check)(Parameters...) = Kernel::check;  // nullptr, often
    return emulator::plan<Parameters...>(Kernel::name, work, check, Kernel::run, workspace_size, executor,
                                         arguments...);
  }
};

}  // namespace emulator

// The C function's parameters follow from the kernel's, so it is an instance of a template. ifunc is how such
// an instance gets a plain C name: the loader asks ..._plan for the address that stands behind the name.
#define ACLNN(operator_name, parameters, ...) \
  ACLNN_KERNEL(operator_name, parameters, ACLNN_NO(work), ACLNN_NO(check), __VA_ARGS__)

#define ACLNN_OF(operator_name, parameters, its_work, ...) \
  ACLNN_KERNEL(operator_name, parameters, ACLNN_WORK(parameters, its_work), ACLNN_NO(check), __VA_ARGS__)

#define ACLNN_AS(operator_name, parameters, ...)                                                                \
  ACLNN_KERNEL(operator_name, parameters, ACLNN_NO(work), ACLNN_CHECK(parameters, at::meta::__VA_ARGS__),       \
               at::__VA_ARGS__)

#define ACLNN_IF(operator_name, parameters, its_check, ...) \
  ACLNN_KERNEL(operator_name, parameters, ACLNN_NO(work), ACLNN_CHECK(parameters, its_check), __VA_ARGS__)

#define ACLNN_OF_IF(operator_name, parameters, its_work, its_check, ...)                                        \
  ACLNN_KERNEL(operator_name, parameters, ACLNN_WORK(parameters, its_work), ACLNN_CHECK(parameters, its_check), \
               __VA_ARGS__)

#define ACLNN_NO(part) static constexpr std::nullptr_t part = nullptr
#define ACLNN_WORK(parameters, ...) \
  static emulator::Work work parameters { return __VA_ARGS__; }
#define ACLNN_CHECK(parameters, ...) \
  static void check parameters { __VA_ARGS__; }

#define ACLNN_KERNEL(operator_name, parameters, its_work, its_check, ...)                              \
  _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wunused-parameter\"")             \
  namespace {                                                                                          \
  struct operator_name##_kernel {                                                                      \
    static constexpr const char* name = #operator_name;                                                \
    its_work;                                                                                          \
    its_check;                                                                                         \
    static void run parameters { __VA_ARGS__; }                                                        \
  };                                                                                                   \
  }                                                                                                    \
  _Pragma("GCC diagnostic pop")                                                                        \
  extern "C" {                                                                                         \
  static auto* operator_name##_plan() { return &emulator::Planner<operator_name##_kernel>::plan; }     \
  }                                                                                                    \
  ACL_EXPORT decltype(emulator::Planner<operator_name##_kernel>::plan) operator_name##GetWorkspaceSize \
      __attribute__((ifunc(#operator_name "_plan")));                                                  \
  ACL_EXPORT aclError operator_name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {    \
    return emulator::launch(executor, stream);                                                         \
  }
