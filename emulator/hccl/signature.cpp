#include "signature.h"

namespace emulator::hccl {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return "HcclAllReduce";
    case Kind::reduce: return "HcclReduce";
    case Kind::broadcast: return "HcclBroadcast";
    case Kind::scatter: return "HcclScatter";
    case Kind::all_gather: return "HcclAllGather";
    case Kind::reduce_scatter: return "HcclReduceScatter";
    case Kind::all_to_all: return "HcclAlltoAll";
    case Kind::barrier: return "HcclBarrier";
    case Kind::transfer: return "HcclSend or HcclRecv";
    default: return "nothing";
  }
}

const char* name_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return "int8";
    case HCCL_DATA_TYPE_INT16: return "int16";
    case HCCL_DATA_TYPE_INT32: return "int32";
    case HCCL_DATA_TYPE_INT64: return "int64";
    case HCCL_DATA_TYPE_UINT8: return "uint8";
    case HCCL_DATA_TYPE_FP16: return "fp16";
    case HCCL_DATA_TYPE_BFP16: return "bf16";
    case HCCL_DATA_TYPE_FP32: return "fp32";
    case HCCL_DATA_TYPE_FP64: return "fp64";
    default: return "elements";
  }
}

const char* name_of(HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return "sum";
    case HCCL_REDUCE_PROD: return "product";
    case HCCL_REDUCE_MAX: return "maximum";
    default: return "minimum";
  }
}

bool reduces(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }

bool has_root(Kind kind) { return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::scatter; }

}  // namespace

size_t size_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 0;
  }
}

bool agree(const Signature& one, const Signature& other) {
  return one.kind == other.kind && one.dtype == other.dtype && one.op == other.op && one.root == other.root &&
         one.count == other.count;
}

std::string in_words(Kind kind, uint64_t count, HcclDataType dtype) {
  const std::string name = name_of(kind);
  if (kind == Kind::none || kind == Kind::barrier) return name;
  if (kind == Kind::all_to_all && count == 0) return name + " of uneven parts";
  return name + " of " + std::to_string(count) + " " + name_of(dtype);
}

std::string in_words(const Signature& signature) {
  std::string text = in_words(signature.kind, signature.count, signature.dtype);
  if (reduces(signature.kind)) text += std::string(", ") + name_of(signature.op);
  if (has_root(signature.kind)) text += ", root " + std::to_string(signature.root);
  return text;
}

double bytes_on_the_way(Kind kind, double nbytes, uint32_t ranks) {
  const double share = (ranks - 1.0) / ranks;
  switch (kind) {
    case Kind::all_reduce: return 2 * share * nbytes;
    case Kind::reduce_scatter:
    case Kind::all_gather:
    case Kind::scatter:
    case Kind::all_to_all: return share * nbytes;
    case Kind::barrier: return 0;
    default: return nbytes;
  }
}

}  // namespace emulator::hccl
