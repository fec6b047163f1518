// What takes long for a large model is done beside the threads that serve connections: here there is one such thread,
// the work stands still, and a receiver is served all the same.
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <future>
#include <stdexcept>

#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

/// Work that stops here until it may go on, so that "while it runs" is an order of events.
class Barrier {
 public:
  std::function<void()> work() {
    return [this] {
      if (std::exchange(passed_, true)) return;
      reached_.set_value();
      go_on_.get_future().wait();
    };
  }
  [[nodiscard]] bool reached() {
    return reached_.get_future().wait_until(test_deadline().at()) == std::future_status::ready;
  }
  void go_on() { go_on_.set_value(); }

 private:
  bool passed_ = false;  // used by the working thread
  std::promise<void> reached_;
  std::promise<void> go_on_;
};

class LongWork : public AgentTest {
 protected:
  LongWork() { options_.net_threads = 1; }

  /// The whole answer to a GET.
  std::string get(const std::string& target) const {
    auto fd = net::connect_tcp("127.0.0.1", agent_->http_port(), test_deadline());
    if (!fd) return {};
    const std::string text = "GET " + target + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
    if (::send(fd->get(), text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size())) return {};
    std::string answer;
    char piece[4096];
    eventually([&] {
      for (;;) {
        const ssize_t n = ::recv(fd->get(), piece, sizeof piece, MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return false;
        if (n <= 0) return true;
        answer.append(piece, static_cast<std::size_t>(n));
      }
    });
    return answer;
  }
  std::vector<TensorSlice> whole_plan() const {
    std::vector<TensorSlice> plan;
    for (std::uint32_t i = 0; i < model_.layout->tensors().size(); ++i) {
      const Tensor& t = model_.layout->tensors()[i];
      if (t.bytes != 0) plan.push_back({i, Rect{0, 0, t.rows, t.cols}});
    }
    return plan;
  }
  void expect_receivers_are_served() {
    auto c = Client::connect(port(), wire::Role::control);
    ASSERT_TRUE(c) << c.error().to_string();
    const auto layout = c->layout();
    ASSERT_TRUE(layout) << layout.error().to_string();
    EXPECT_EQ((*layout)->digest(), model_.layout->digest());
  }
};

TEST_F(LongWork, AListingOfAllTensorsHoldsUpNobody) {
  Barrier listing;
  options_.http->before_deferred = listing.work();
  start_agent();
  next_version();
  auto page = std::async(std::launch::async, [&] { return get("/v1/layout?tensors=1"); });
  const bool reached = listing.reached();
  EXPECT_TRUE(reached);
  if (reached) {
    expect_receivers_are_served();
    EXPECT_NE(get("/healthz").find("ok"), std::string::npos);
  }
  listing.go_on();
  EXPECT_NE(page.get().find("tensor_list"), std::string::npos);
}

TEST_F(LongWork, ACheckOfPlansHoldsUpNobody) {
  Barrier check;
  options_.trainer.before_check = check.work();
  start_agent();
  next_version();
  std::vector<TensorSlice> plan = whole_plan();
  auto verdict = std::async(std::launch::async, [&] { return writer_->register_plan(plan, test_deadline()); });
  const bool reached = check.reached();
  EXPECT_TRUE(reached);
  if (reached) expect_receivers_are_served();
  check.go_on();
  const Status status = verdict.get();
  EXPECT_TRUE(status) << status.error().to_string();
  plan.pop_back();
  EXPECT_EQ(writer_->register_plan(plan, test_deadline()).error().code(), Errc::coverage);
}

TEST_F(LongWork, WhatThrowsIsAnErrorOfItsConversation) {
  std::atomic<int> times{2};
  const auto broken = [&times] {
    if (times-- > 0) throw std::runtime_error("no luck");
  };
  options_.http->before_deferred = broken;
  options_.trainer.before_check = broken;
  start_agent();
  next_version();
  const std::string page = get("/v1/layout");
  EXPECT_EQ(page.substr(0, 12), "HTTP/1.1 500") << page;
  EXPECT_NE(page.find("no luck"), std::string::npos) << page;
  const std::vector<TensorSlice> plan = whole_plan();
  const Status refused = writer_->register_plan(plan, test_deadline());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::internal);
  EXPECT_NE(refused.error().message().find("no luck"), std::string::npos) << refused.error().message();
  EXPECT_TRUE(writer_->register_plan(plan, test_deadline()));
  EXPECT_EQ(get("/v1/layout").substr(0, 12), "HTTP/1.1 200");
}

// ---- generations ---------------------------------------------------------------------------------------------------

class ReclaimerTest : public ::testing::Test {
 protected:
  GenerationPtr make(std::uint64_t number) {
    auto made = Generation::create({dir_.path(), segment_name("reclaimer", number)}, number, model_.layout,
                                   model_.layout->encode(), {});
    EXPECT_TRUE(made) << made.error().to_string();
    return reclaimer_->keep(std::move(made).value());
  }
  test::TempDir dir_;
  test::TestModel model_ = test::make_model(1);
  std::shared_ptr<Reclaimer> reclaimer_ = std::make_shared<Reclaimer>();
};

TEST_F(ReclaimerTest, TheLastHolderDoesNotUnmap) {
  GenerationPtr first = make(1);
  GenerationPtr reader = first;
  const GenerationPtr second = make(2);
  const ByteSpan half = first->segment->half(0);
  first.reset();
  reclaimer_->clear();
  EXPECT_TRUE(reclaimer_->has(1)) << "it has a reader";
  EXPECT_TRUE(reclaimer_->held(1));
  reader.reset();
  EXPECT_FALSE(reclaimer_->held(1));
  ASSERT_TRUE(reclaimer_->has(1)) << "the reader must not be the one that unmaps";
  EXPECT_EQ(half[0], std::byte{0}) << "still mapped";
  reclaimer_->clear();
  EXPECT_FALSE(reclaimer_->has(1));
  EXPECT_TRUE(reclaimer_->has(2));
}

TEST_F(ReclaimerTest, WhatIsRetiredEndsOnTheThreadThatClears) {
  std::promise<std::thread::id> ended;
  auto deltas = std::shared_ptr<const int>(new int(1), [&](const int* p) {
    delete p;
    ended.set_value(std::this_thread::get_id());
  });
  auto where = ended.get_future();
  reclaimer_->retire(std::move(deltas));
  EXPECT_EQ(where.wait_for(std::chrono::seconds(0)), std::future_status::timeout) << "ended by who retired it";
  std::thread worker([&] { reclaimer_->work(); });
  const auto id = worker.get_id();
  EXPECT_EQ(where.wait_until(test_deadline().at()), std::future_status::ready);
  EXPECT_EQ(where.get(), id);
  GenerationPtr first = make(1);
  first.reset();
  EXPECT_TRUE(eventually([&] { return !reclaimer_->has(1); }));
  reclaimer_->close();
  worker.join();
}

TEST_F(ReclaimerTest, OnceItIsClosedTheLastHolderUnmaps) {
  GenerationPtr first = make(1);
  GenerationPtr second = make(2);
  first.reset();
  reclaimer_->close();
  EXPECT_FALSE(reclaimer_->has(1));
  second.reset();
  EXPECT_FALSE(reclaimer_->has(2));
}

}  // namespace
}  // namespace deltasync::agent
