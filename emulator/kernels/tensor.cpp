// Making, reading and destroying CANN's argument types.
#include "tensor.h"

#include <cstring>
#include <stdexcept>

namespace emulator {

at::ScalarType scalar_type(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    case ACL_FLOAT8_E5M2: return at::kFloat8_e5m2;
    case ACL_FLOAT8_E4M3FN: return at::kFloat8_e4m3fn;
    default:
      throw std::invalid_argument("the emulated NPU does not know the dtype of a tensor or number, aclDataType " +
                                  std::to_string(static_cast<int>(dtype)));
  }
}

template <class T>
static T read(const aclScalar& source) {
  T value;
  std::memcpy(&value, source.bytes, sizeof value);
  return value;
}

at::Scalar scalar(const aclScalar& source) {
  switch (scalar_type(source.dtype)) {
    case at::kFloat: return read<float>(source);
    case at::kHalf: return read<at::Half>(source);
    case at::kBFloat16: return read<at::BFloat16>(source);
    case at::kDouble: return read<double>(source);
    case at::kChar: return read<int8_t>(source);
    case at::kShort: return read<int16_t>(source);
    case at::kInt: return read<int32_t>(source);
    case at::kLong: return read<int64_t>(source);
    case at::kByte: return read<uint8_t>(source);
    case at::kUInt16: return read<uint16_t>(source);
    case at::kUInt32: return read<uint32_t>(source);
    case at::kUInt64: return read<uint64_t>(source);
    case at::kBool: return read<bool>(source);
    case at::kComplexFloat: return read<c10::complex<float>>(source);
    case at::kComplexDouble: return read<c10::complex<double>>(source);
    default: throw std::logic_error("no scalar of this dtype");
  }
}

at::Tensor tensor(const aclTensor* source) {
  if (source == nullptr) return {};
  at::ScalarType dtype = scalar_type(source->dtype);
  char* begin = static_cast<char*>(source->storage) + source->storage_offset * at::elementSize(dtype);
  return at::from_blob(begin, source->sizes, source->strides, dtype);
}

at::Tensor index(const aclTensor* source) {
  at::Tensor view = tensor(source);
  if (view.defined() && view.scalar_type() != at::kInt && view.scalar_type() != at::kLong) {
    throw std::invalid_argument(std::string("an index is of int32 or int64, not of ") +
                                c10::toString(view.scalar_type()));
  }
  return view;
}

std::vector<at::Tensor> tensors(const aclTensorList* source) {
  std::vector<at::Tensor> views;
  if (source == nullptr) return views;
  for (const aclTensor* each : source->tensors) views.push_back(tensor(each));
  return views;
}

}  // namespace emulator

static size_t scalar_size(aclDataType dtype) {
  try {
    return at::elementSize(emulator::scalar_type(dtype));
  } catch (const std::invalid_argument&) {
    return 0;
  }
}

ACL_EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType dtype,
                                      const int64_t* strides, int64_t storage_offset, aclFormat,
                                      const int64_t*, uint64_t, void* storage) {
  return new aclTensor{{sizes, sizes + dimensions}, {strides, strides + dimensions}, storage_offset, dtype,
                       storage};
}

ACL_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  auto* scalar = new aclScalar{dtype, {}};
  std::memcpy(scalar->bytes, value, scalar_size(dtype));
  return scalar;
}

ACL_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{std::vector<int64_t>(values, values + size)};
}

ACL_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{std::vector<float>(values, values + size)};
}

ACL_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(values, values + size)};
}

// A list owns its members: destroying it destroys them.
ACL_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}

ACL_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  return new aclScalarList{{scalars, scalars + size}};
}

template <class T>
static aclError destroy(const T* object) {
  delete object;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }
ACL_EXPORT aclError aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }
ACL_EXPORT aclError aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }
ACL_EXPORT aclError aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }
ACL_EXPORT aclError aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }

ACL_EXPORT aclError aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors) destroy(tensor);
  return destroy(list);
}

ACL_EXPORT aclError aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* scalar : list->scalars) destroy(scalar);
  return destroy(list);
}
