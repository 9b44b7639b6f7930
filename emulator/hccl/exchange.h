// One operation that several ranks make together, as this rank sees it: a collective, a send, a receive, or a batch of
// these two. On a stream it is two operations:
//
//   lay out   puts what this rank gives into its tray, and never waits for another rank
//   take      waits until all ranks have laid out, reads the trays, and writes the result
//
// So a schedule that runs one operation at a time can run these too: it leaves alone what is not ready. In modelled
// time all is one: it begins when the stream gets there, and ends for all ranks at once.
#pragma once

#include "board.h"

#include "../runtime/operation.h"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace emulator::hccl {

// What lies in the trays of one operation.
class Trays {
 public:
  Trays(const Channel& channel, uint64_t number) : channel_(channel), number_(number) {}

  const char* of(size_t party) const { return channel_.tray(party, number_); }
  const Signature& signature(size_t party) const { return channel_.parties[party].signatures[number_ % kTrays]; }
  size_t parties() const { return channel_.ranks.size(); }

 private:
  const Channel& channel_;
  const uint64_t number_;
};

// What happens on one channel.
struct Leg {
  Channel channel;
  size_t party;                           // this rank's place there
  Signature signature;
  std::vector<Range> gives = {};          // they lie in the tray one behind the other
  std::vector<Range> gets = {};           // what `take` writes
  std::function<void(Trays)> take = {};   // throws std::runtime_error where ranks do not go together; may be empty
  uint64_t number = 0;                    // of the operation on that channel
};

class Exchange : public JointOperation {
 public:
  // patience: how long one rank waits for another before all give up.
  Exchange(std::shared_ptr<Board> board, std::vector<Leg> legs, std::chrono::seconds patience);

  // What the two operations do. Both throw std::runtime_error where the communicator has failed.
  void lay_out();
  void take();

  bool ready() override;
  void demand() override;
  void wait() override;
  void abandon() override;

  void arrives(Nanoseconds time, Nanoseconds lasts, const LinkUse& link) override;
  std::optional<Nanoseconds> ends() override;
  std::vector<LinkUse> links() override;
  void wait_for_end() override;

 private:
  using Clock = std::chrono::steady_clock;
  using Test = bool (*)(const Leg& leg, const Party& party);

  void check_agreement(const Leg& leg) const;
  void give_up_on(Test is_missing);
  void give_up_on(const Leg& leg, size_t party, const std::string& why);
  void throw_if_failed() const;

  const std::shared_ptr<Board> board_;
  const std::vector<Leg> legs_;
  const std::chrono::seconds patience_;
  std::mutex mutex_;
  std::optional<Clock::time_point> waited_since_;
  std::optional<Nanoseconds> ends_;
  std::vector<LinkUse> links_;
};

}  // namespace emulator::hccl
