#include "model.h"

#include "settings.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace emulator {
namespace {

constexpr double kPerSecond = 1e-9;  // of a rate per second, what it is per nanosecond

std::vector<std::string> parts(const std::string& text, char separator) {
  std::vector<std::string> found;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) found.push_back(part);
  return found;
}

std::pair<std::string, std::string> halves(const std::string& text, char separator) {
  const size_t at = text.find(separator);
  return {text.substr(0, at), text.substr(at + 1)};
}

std::map<std::string, std::string> parsed(const std::string& figures) {
  std::map<std::string, std::string> found;
  for (const std::string& figure : parts(figures, ';')) found.insert(halves(figure, '='));
  return found;
}

}  // namespace

Model::Model(const std::string& figures)
    : figures_(parsed(figures)),
      matrix_launch_(microseconds("launch.matrix_us")),
      vector_launch_(microseconds("launch.vector_us")),
      bytes_per_ns_(number("memory.bytes_per_s") * number("memory.share") / number("step.factor") * kPerSecond),
      softmax_bytes_per_ns_(number("memory.bytes_per_s") * number("memory.softmax_share") / number("step.factor") *
                            kPerSecond),
      bfloat16_(number("matrix.bfloat16") * kPerSecond),
      float16_(number("matrix.float16") * kPerSecond),
      float32_(number("matrix.float32") * kPerSecond),
      convolution_share_(number("matrix.convolution_share")),
      step_factor_(number("step.factor")),
      latency_(microseconds("link.latency_us")),
      issue_(microseconds("host.issue_us")),
      event_(microseconds("host.event_us")),
      query_(microseconds("host.query_us")),
      wait_(microseconds("host.wait_us")),
      operator_(microseconds("host.operator_us")),
      h2d_(number("link.h2d_bytes_per_s") * kPerSecond),
      d2h_(number("link.d2h_bytes_per_s") * kPerSecond),
      host_memory_(number_or_0("host_memory.bytes_per_s") * kPerSecond),
      ring_(number("cards.ring_bytes_per_s") * kPerSecond),
      pair_(number("cards.pair_bytes_per_s") * kPerSecond),
      ring_start_(microseconds("cards.start_us")),
      h2d_beside_d2h_(number("link.h2d_beside_d2h")),
      d2h_beside_h2d_(number("link.d2h_beside_h2d")),
      pageable_share_(number("link.pageable_share")),
      drive_latency_(std::llround(number_or_0("drives.latency_us") * 1000)),
      drive_read_(number_or_0("drives.read_bytes_per_s") * kPerSecond),
      drive_write_(number_or_0("drives.write_bytes_per_s") * kPerSecond),
      matmul_shares_(shares("matrix.matmul_shares")),
      attention_shares_(shares("matrix.attention_shares")) {}

double Model::number(const std::string& key) const { return std::stod(figures_.at(key)); }

double Model::number_or_0(const std::string& key) const { return figures_.contains(key) ? number(key) : 0; }

Nanoseconds Model::microseconds(const std::string& key) const { return std::llround(number(key) * 1000); }

Model::Shares Model::shares(const std::string& key) const {
  Shares found;
  for (const std::string& row : parts(figures_.at(key), ',')) {
    const auto [size, share] = halves(row, ':');
    found.emplace_back(std::stod(size), std::stod(share));
  }
  return found;
}

// Between two rows of the table on the straight line, outside of it as at its nearest end.
double Model::share(const Shares& shares, double size) {
  const auto above =
      std::find_if(shares.begin(), shares.end(), [size](const auto& row) { return row.first >= size; });
  if (above == shares.begin()) return above->second;
  const auto& [low, share] = *std::prev(above);
  if (above == shares.end()) return share;
  return share + (above->second - share) * (size - low) / (above->first - low);
}

double Model::flops_per_ns(const Work& work) const {
  const double peak = work.dtype == ACL_BF16 ? bfloat16_ : work.dtype == ACL_FLOAT16 ? float16_ : float32_;
  switch (work.unit) {
    case Unit::attention: return peak * share(attention_shares_, work.least) / step_factor_;
    case Unit::convolution: return peak * convolution_share_ / step_factor_;
    default: return peak * share(matmul_shares_, work.least) / step_factor_;
  }
}

Nanoseconds Model::kernel(const Work& work) const {
  const double moving = work.nbytes / (work.unit == Unit::softmax ? softmax_bytes_per_ns_ : bytes_per_ns_);
  if (work.unit == Unit::vector || work.unit == Unit::softmax) return vector_launch_ + std::llround(moving);
  return matrix_launch_ + std::llround(std::max(moving, work.flops / flops_per_ns(work)));
}

double Model::link_rate(const Work& work) const {
  const bool up = work.unit == Unit::h2d;
  const double chosen = (up ? settings().h2d_bytes_per_s : settings().d2h_bytes_per_s) * kPerSecond;
  const double rate = chosen > 0 ? chosen : up ? h2d_ : d2h_;
  return work.pageable ? rate * pageable_share_ : rate;
}

double Model::host_memory() const {
  const double chosen = settings().host_memory_bytes_per_s * kPerSecond;
  return chosen > 0 ? chosen : host_memory_;
}

Nanoseconds Model::drive(const Work& work) const {
  return drive_latency_ + std::llround(work.nbytes / (work.unit == Unit::drive_read ? drive_read_ : drive_write_));
}

// With few cards a ring has no more links than they have with each other.
Nanoseconds Model::ring(const Work& work) const {
  const double links = std::max(1.0, work.ranks - 1.0);
  return ring_start_ + std::llround(work.nbytes / std::min(ring_, links * pair_));
}

double Model::share_beside(Unit direction) const { return direction == Unit::h2d ? h2d_beside_d2h_ : d2h_beside_h2d_; }

}  // namespace emulator
