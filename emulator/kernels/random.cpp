// Random numbers. They follow from the seed and the offset that torch_npu's generator hands out, so
// torch.manual_seed makes them reproducible; they are not the numbers that an Ascend device would draw.
#include "dropout.h"

#include <ATen/CPUGeneratorImpl.h>

using namespace emulator;

static at::Generator generator(uint64_t seed, uint64_t offset) {
  constexpr uint64_t odd_and_large = 0x9E3779B97F4A7C15;
  return at::detail::createCPUGenerator(seed ^ (offset * odd_and_large));
}

ACLNN(aclnnInplaceNormal, (Out self, float mean, float deviation, int64_t seed, int64_t offset),
      self.normal_(mean, deviation, generator(seed, offset)))
ACLNN(aclnnInplaceUniform, (Out self, double from, double to, uint64_t seed, uint64_t offset),
      self.uniform_(from, to, generator(seed, offset)))
ACLNN(aclnnInplaceRandom, (Out self, int64_t from, int64_t to, uint64_t seed, uint64_t offset),
      self.random_(from, to, generator(seed, offset)))
ACLNN(aclnnInplaceBernoulli, (Out self, Number probability, uint64_t seed, uint64_t offset),
      self.bernoulli_(probability.toDouble(), generator(seed, offset)))
ACLNN(aclnnInplaceBernoulliTensor, (Out self, In probabilities, uint64_t seed, uint64_t offset),
      self.bernoulli_(probabilities, generator(seed, offset)))

// In a graph the seed and the offset at the replay's begin are read from the device. What the graph has drawn before adds
// to the offset, so a replay draws what the same calls would have drawn outside it.
static at::Generator generator(In seed, In begin, uint64_t offset) {
  return generator(seed.item<int64_t>(), begin.item<int64_t>() + offset);
}

ACLNN(aclnnInplaceNormalTensor, (Out self, float mean, float deviation, In seed, In begin, int64_t offset),
      self.normal_(mean, deviation, generator(seed, begin, offset)))
ACLNN(aclnnInplaceUniformTensor, (Out self, double from, double to, In seed, In begin, uint64_t offset),
      self.uniform_(from, to, generator(seed, begin, offset)))
ACLNN(aclnnInplaceRandomTensor, (Out self, int64_t from, int64_t to, In seed, In begin, uint64_t offset),
      self.random_(from, to, generator(seed, begin, offset)))

static void dropout_mask(int64_t elements, double probability, const at::Generator& drawn, Out mask) {
  at::Tensor kept = at::empty({elements}, at::kBool);
  kept.bernoulli_(1 - probability, drawn);
  uint8_t* bytes = mask.zero_().data_ptr<uint8_t>();
  const bool* flags = kept.const_data_ptr<bool>();
  for (int64_t i = 0; i < elements; ++i) bytes[i / 8] |= flags[i] << (i % 8);
}

at::Tensor emulator::unpack_dropout_mask(In mask, at::IntArrayRef shape) {
  at::Tensor kept = at::empty(shape, at::kBool);
  const uint8_t* bytes = mask.const_data_ptr<uint8_t>();
  bool* flags = kept.data_ptr<bool>();
  for (int64_t i = 0; i < kept.numel(); ++i) flags[i] = bytes[i / 8] >> (i % 8) & 1;
  return kept;
}

ACLNN(aclnnDropoutGenMaskV2,
      (Integers shape, double probability, int64_t seed, int64_t offset, aclDataType, Out mask),
      dropout_mask(c10::multiply_integers(shape), probability, generator(seed, offset), mask))
ACLNN(aclnnDropoutGenMaskV2Tensor,
      (Integers shape, double probability, In seed, In begin, uint64_t offset, aclDataType, Out mask),
      dropout_mask(c10::multiply_integers(shape), probability, generator(seed, begin, offset), mask))
ACLNN(aclnnDropoutDoMask, (In self, In mask, double probability, Out out),
      out.copy_(self * unpack_dropout_mask(mask, self.sizes()) * (1 / (1 - probability))))
