#include "communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

namespace emulator::hccl {
namespace {

int current_device() {
  int32_t device = 0;
  aclrtGetDevice(&device);
  return device;
}

// Ranks may each be shown one device only, and call it 0.
int number_in_machine(int device) {
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::istringstream list(visible == nullptr ? "" : visible);
  std::string each;
  for (int i = 0; std::getline(list, each, ','); ++i) {
    if (i == device) return std::atoi(each.c_str());
  }
  return device;
}

size_t total(const std::vector<Range>& ranges) {
  size_t nbytes = 0;
  for (const Range& range : ranges) nbytes += range.nbytes;
  return nbytes;
}

std::vector<Range> without_empty(std::vector<Range> ranges) {
  std::erase_if(ranges, [](const Range& range) { return range.nbytes == 0; });
  return ranges;
}

}  // namespace

HcclResult refuse(HcclResult code, const std::string& message) {
  fail(code, message);
  return code;
}

Communicator::Communicator(const RootInfo& root, uint32_t ranks, uint32_t rank, std::string name, size_t buffer_bytes,
                           std::chrono::seconds patience)
    : ranks_(ranks),
      rank_(rank),
      name_(std::move(name)),
      buffer_bytes_(buffer_bytes),
      device_(current_device()),
      patience_(patience),
      board_(std::make_shared<Board>(root, ranks, rank, number_in_machine(device_),
                                     patience_of("HCCL_CONNECT_TIMEOUT", kDefaultPatience))),
      attendant_(*board_) {
  if (take_device_memory(buffer_bytes)) return;
  board_->leave();
  throw std::runtime_error("a communicator needs " + std::to_string(buffer_bytes >> 20) + " MiB, free are " +
                           free_device_memory() + "; HCCL_BUFFSIZE sets half of it, in MiB");
}

Communicator::~Communicator() {
  if (last_point_) finish(*last_point_);
  board_->leave();
  give_device_memory(device_, buffer_bytes_);
}

HcclResult Communicator::collective(const char* function, aclrtStream stream, Signature signature,
                                    std::vector<Range> gives, std::vector<Range> gets,
                                    std::function<void(Trays)> take) {
  const double nbytes = static_cast<double>(std::max(total(gives), total(gets)));
  const Work work{.unit = Unit::ring, .nbytes = bytes_on_the_way(signature.kind, nbytes, ranks_), .ranks = ranks_};
  return put(function, stream,
             {{board_->everybody(), rank_, signature, without_empty(std::move(gives)), without_empty(std::move(gets)),
               std::move(take)}},
             work);
}

HcclResult Communicator::transfers(const char* function, aclrtStream stream, const std::vector<Transfer>& transfers) {
  std::map<std::pair<bool, uint32_t>, std::vector<Transfer>> messages;
  for (const Transfer& each : transfers) {
    if (each.peer >= ranks_) {
      return refuse(HCCL_E_PARA, std::string(function) + ": no rank " + std::to_string(each.peer) + " among " +
                                     std::to_string(ranks_));
    }
    messages[{each.sends, each.peer}].push_back(each);
  }
  std::vector<Leg> legs;
  Work work{.unit = Unit::ring, .ranks = 2};
  for (const auto& [_, message] : messages) {
    legs.push_back(leg_of(message));
    const Signature& signature = legs.back().signature;
    work.nbytes = std::max(work.nbytes, static_cast<double>(signature.count * size_of(signature.dtype)));
  }
  return legs.empty() ? HCCL_SUCCESS : put(function, stream, std::move(legs), work);
}

Leg Communicator::leg_of(const std::vector<Transfer>& message) const {
  const Transfer& first = message.front();
  std::vector<Range> ranges;
  for (const Transfer& each : message) ranges.push_back({each.buffer, each.count * size_of(each.dtype)});
  ranges = without_empty(std::move(ranges));
  Signature signature{.kind = Kind::transfer, .dtype = first.dtype, .count = first.count};
  if (message.size() > 1) signature = {.kind = Kind::transfer, .dtype = HCCL_DATA_TYPE_UINT8, .count = total(ranges)};
  if (first.sends) {
    return {.channel = board_->pair(rank_, first.peer), .party = 0, .signature = signature, .gives = ranges};
  }
  const auto take = [ranges](Trays trays) {
    const char* place = trays.of(0);
    for (const Range& range : ranges) {
      std::memcpy(const_cast<void*>(range.begin), place, range.nbytes);
      place += range.nbytes;
    }
  };
  return {.channel = board_->pair(first.peer, rank_), .party = 1, .signature = signature, .gets = ranges, .take = take};
}

HcclResult Communicator::put(const std::string& function, aclrtStream stream, std::vector<Leg> legs, Work work) {
  for (Leg& leg : legs) {
    leg.signature.given = total(leg.gives);
    if (leg.signature.given > kTray) {
      return refuse(HCCL_E_NOT_SUPPORT, function + ": " + std::to_string(leg.signature.given) +
                                            " bytes of one rank; emulated are " + std::to_string(kTray));
    }
  }
  if (is_in_capture(stream)) {
    return refuse(HCCL_E_NOT_SUPPORT, function + ": a collective in a graph is not emulated");
  }
  std::lock_guard lock(issuing_);
  for (Leg& leg : legs) {
    Party& mine = leg.channel.parties[leg.party];
    mine.last_kind = leg.signature.kind;
    mine.last_dtype = leg.signature.dtype;
    mine.last_count = leg.signature.count;
    leg.number = ++mine.called;
  }
  const HcclResult code = submit_both(function, stream, legs, work);
  if (code != HCCL_SUCCESS) {
    board_->fail(function + ", operation " + std::to_string(legs.front().number) + ": " + board_->name_of(rank_) +
                " could not issue it: " + aclGetRecentErrMsg());
  }
  return code;
}

HcclResult Communicator::submit_both(const std::string& function, aclrtStream stream, const std::vector<Leg>& legs,
                                     Work work) {
  const auto exchange = std::make_shared<Exchange>(board_, legs, patience_);
  const auto laid_out = std::make_shared<StreamPoint>();
  const auto taken = std::make_shared<StreamPoint>();
  Operation lay{.name = function + " (reads)", .reads = {}, .writes = {}, .body = [exchange] { exchange->lay_out(); }};
  Operation take{.name = function, .reads = {}, .writes = {}, .body = [exchange] { exchange->take(); }};
  for (const Leg& leg : legs) {
    lay.reads.insert(lay.reads.end(), leg.gives.begin(), leg.gives.end());
    take.writes.insert(take.writes.end(), leg.gets.begin(), leg.gets.end());
  }
  if (last_point_ && last_stream_ != stream) lay.awaits = last_point_;
  lay.reaches = laid_out;
  lay.work = {.unit = Unit::none};
  take.joint = exchange;
  take.reaches = taken;
  take.work = work;
  take.own_call = false;
  if (submit(stream, std::move(lay)) != ACL_SUCCESS) return HCCL_E_RUNTIME;
  for (const Leg& leg : legs) attendant_.promise(leg.channel.parties[leg.party], 2 * leg.number - 1, laid_out);
  if (submit(stream, std::move(take)) != ACL_SUCCESS) return HCCL_E_RUNTIME;
  last_stream_ = stream;
  last_point_ = taken;
  return HCCL_SUCCESS;
}

}  // namespace emulator::hccl
