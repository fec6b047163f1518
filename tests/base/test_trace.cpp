// Spans: what is kept, what is dropped, that nobody reads half of one, and that the file is JSON whatever names hold.
#include "base/trace.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <thread>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"

namespace deltasync::trace {
namespace {

using nlohmann::json;

const VersionId kVersion{0xE18C, 12};

class Trace : public testing::Test {
 protected:
  ~Trace() override { stop_timeline(); }
  static void start(std::uint32_t spans_per_thread = 1000) { start_timeline("test", spans_per_thread); }
  /// Of all threads.
  static std::vector<Event> events() {
    std::vector<Event> all;
    for (const ThreadRecord& thread : snapshot().threads) {
      all.insert(all.end(), thread.events.begin(), thread.events.end());
    }
    return all;
  }
};

TEST_F(Trace, RecordsNothingWhileItIsOff) {
  start();
  stop_timeline();
  EXPECT_FALSE(timeline_is_on());
  {
    Span span("off", kVersion, {{"bytes", 1}});
    span.set({"more", 2});
    note({"most", 3});
    EXPECT_EQ(context().name, nullptr);
  }
  record("off", kVersion, 1, 2);
  EXPECT_EQ(add_track("off"), 0u);
  name_version({kVersion, "off"});
  const Record record = snapshot();
  EXPECT_TRUE(record.threads.empty());
  EXPECT_TRUE(record.versions.empty());
}

TEST_F(Trace, ASpanInsideAnotherHasItsVersion) {
  start();
  {
    Span outer("outer", kVersion, {{"bytes", 7}, {"mode", "delta"}});
    { const Span inner("inner"); }
    const Span other("other", VersionId{1, 1});
    note({"noted", 5});
  }
  const auto got = events();
  ASSERT_EQ(got.size(), 3u);  // by their end
  EXPECT_STREQ(got[0].name, "inner");
  EXPECT_EQ(got[0].version, kVersion);
  EXPECT_STREQ(got[1].name, "other");
  EXPECT_EQ(got[1].version, (VersionId{1, 1}));
  EXPECT_STREQ(got[1].args[0].name, "noted");
  EXPECT_STREQ(got[2].name, "outer");
  EXPECT_EQ(got[2].args[0].value, 7u);
  EXPECT_EQ(got[2].texts, 2u);
  EXPECT_LE(got[2].begin_ns, got[0].begin_ns);
  EXPECT_LE(got[0].end_ns, got[1].begin_ns);
  EXPECT_LE(got[1].end_ns, got[2].end_ns);
}

TEST_F(Trace, AVersionMayBeKnownLate) {
  start();
  {
    Span span("plan");
    span.set_version(kVersion);
  }
  ASSERT_EQ(events().size(), 1u);
  EXPECT_EQ(events()[0].version, kVersion);
}

TEST_F(Trace, KeepsTheNewestAndCountsTheRest) {
  start(16);
  for (std::uint64_t i = 0; i < 100; ++i) record("span", kVersion, i, i + 1);
  const Record got = snapshot();
  ASSERT_EQ(got.threads.size(), 1u);
  const auto& events = got.threads[0].events;
  // One place less than there is: the oldest may be being written over at any moment.
  ASSERT_EQ(events.size(), 15u);
  EXPECT_EQ(got.threads[0].dropped, 85u);
  for (std::size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].begin_ns, 85 + i);
}

TEST_F(Trace, ShortSpansCanBeLeftOut) {
  start();
  {
    Span span("short");
    span.drop_if_shorter(~std::uint64_t{0});
  }
  {
    Span span("long");
    span.drop_if_shorter(0);
  }
  ASSERT_EQ(events().size(), 1u);
  EXPECT_STREQ(events()[0].name, "long");
}

TEST_F(Trace, HasRoomForSoManyArgumentsAndNoMore) {
  start();
  {
    Span span("full", {{"a", 1}, {"b", 2}, {"c", 3}, {"d", 4}, {"e", 5}});
    span.set({"f", 6});
  }
  ASSERT_EQ(events().size(), 1u);
  EXPECT_STREQ(events()[0].args[3].name, "d");
}

TEST_F(Trace, ASnapshotHasNoHalfSpans) {
  start(2);  // each span lands on the last but one
  constexpr unsigned kThreads = 2;
  constexpr std::uint64_t kSpans = 300'000;  // at least
  constexpr std::uint64_t kExaminedMin = 1000;
  std::atomic<unsigned> running = kThreads;
  std::atomic<bool> enough = false;
  std::array<std::uint64_t, kThreads> recorded{};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 1; i <= kSpans || !enough; ++i) {
        const std::uint64_t x = i * kThreads + t;
        record("span", {x, x}, x, x, {{"a", x}, {"b", x}, {"c", x}, {"d", x}});
        recorded[t] = i;
      }
      --running;
    });
  }
  std::uint64_t torn = 0;
  std::uint64_t examined = 0;
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  while (running != 0) {
    enough = examined >= kExaminedMin || deadline.passed();
    for (const Event& e : events()) {
      ++examined;
      const std::uint64_t x = e.begin_ns;
      bool whole = e.end_ns == x && e.version.epoch == x && e.version.number == x;
      for (const auto& arg : e.args) whole = whole && arg.value == x;
      if (!whole) ++torn;
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn, 0u);
  EXPECT_GE(examined, kExaminedMin);
  const auto last = events();
  ASSERT_EQ(last.size(), kThreads);
  for (const Event& e : last) EXPECT_EQ(e.begin_ns / kThreads, recorded[e.begin_ns % kThreads]);
}

TEST_F(Trace, ASpanThatBeganBeforeTheRecordIsNotInIt) {
  start();
  {
    const Span before("before", kVersion);
    start();
  }
  EXPECT_TRUE(events().empty());
}

// ---- fork --------------------------------------------------------------------------------------------------------

/// What a child of fork() finds wrong; 0: nothing.
int check_child(std::optional<Span>& parents) {
  if (timeline_is_on()) return 1;
  { const Span span("before the start", kVersion); }
  if (snapshot().started || !snapshot().threads.empty() || !snapshot().versions.empty()) return 2;
  const auto written = write_timeline("/dev/shm/deltasync-nobody-writes-this");
  if (written || written.error().code() != Errc::invalid_argument) return 3;
  start_timeline("child");
  parents.reset();  // began in the parent: not the child's
  { const Span span("childs", kVersion); }
  name_version({kVersion, "label"});
  const Record record = snapshot();
  if (record.process != "child" || record.threads.size() != 1 || record.versions.size() != 1) return 4;
  const auto& events = record.threads[0].events;
  return events.size() == 1 && std::string_view(events[0].name) == "childs" ? 0 : 5;
}

TEST_F(Trace, AForkedChildBeginsWithoutARecord) {
  start();
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {  // always in the middle of something
      for (std::uint64_t i = 0; !stop; ++i) {
        const Span span("work", {t, i});
        name_version({{t, i % 700}, "some version"});
        snapshot();
      }
    });
  }
  for (int round = 0; round < 50; ++round) {
    std::optional<Span> parents;
    parents.emplace("parents", kVersion);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(20);  // a process that hangs is killed
      ::_exit(check_child(parents));
    }
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(timeline_is_on()) << "the parent goes on";
  EXPECT_FALSE(events().empty());
}

TEST_F(Trace, KeepsWhatEndedThreadsDid) {
  start();
  std::thread([] {
    set_thread_name("gone");
    const Span span("work", kVersion);
  }).join();
  const Record got = snapshot();
  ASSERT_EQ(got.threads.size(), 1u);
  EXPECT_EQ(got.threads[0].name, "gone");
  EXPECT_EQ(got.threads[0].events.size(), 1u);
  EXPECT_EQ(got.lost, 0u);
}

TEST_F(Trace, KeepsABoundedNumberOfEndedThreads) {
  start(2);
  constexpr unsigned kThreads = 300;
  for (unsigned i = 0; i < kThreads; ++i) {
    std::thread([i] { record("work", kVersion, i, i + 1); }).join();
  }
  const Record got = snapshot();
  EXPECT_EQ(got.threads.size(), 256u);
  EXPECT_EQ(got.lost, kThreads - 256u);
  EXPECT_EQ(got.threads.back().events.back().begin_ns, kThreads - 1);
}

TEST_F(Trace, APoolsWorkIsPartsOfWhatItsCallerIsIn) {
  start();
  ThreadPool pool(3, "pool");
  pool.run(4, [](std::uint64_t, unsigned) {});  // outside of any span
  EXPECT_TRUE(events().empty());
  {
    const Span span("stage", kVersion);
    pool.run(10, [](std::uint64_t, unsigned) { const Span inner("inner"); });
  }
  std::set<std::uint64_t> parts;
  unsigned inner = 0;
  unsigned whole = 0;
  for (const Event& e : events()) {
    EXPECT_EQ(e.version, kVersion);
    if (e.name == std::string_view("inner")) ++inner;
    if (e.name != std::string_view("stage")) continue;
    if (e.args[0].name == nullptr) {
      ++whole;
    } else {
      EXPECT_STREQ(e.args[0].name, "part");
      parts.insert(e.args[0].value);
    }
  }
  EXPECT_EQ(parts.size(), 10u);
  EXPECT_EQ(*parts.rbegin(), 9u);
  EXPECT_EQ(inner, 10u);
  EXPECT_EQ(whole, 1u);
}

TEST_F(Trace, AnotherStartForgets) {
  start();
  record("before", kVersion, 1, 2);
  name_version({kVersion, "before"});
  start();
  EXPECT_TRUE(events().empty());
  record("after", kVersion, 3, 4);
  ASSERT_EQ(events().size(), 1u);
  EXPECT_STREQ(events()[0].name, "after");
  EXPECT_TRUE(snapshot().versions.empty());
}

TEST_F(Trace, OtherClocksOnly) {
  start();
  add_clock_sample({clock_id(), 1, 2, 3});
  Digest128 other = clock_id();
  other.bytes[0] ^= 1;
  add_clock_sample({other, 1, 2, 3});
  ASSERT_EQ(snapshot().clocks.size(), 1u);
  EXPECT_EQ(snapshot().clocks[0].clock, other);
}

TEST_F(Trace, TheFileIsJsonWhateverNamesHold) {
  start_timeline("tr\"ain\\er\n\x01\x7F");
  name_version({{1, 1}, "quote \" backslash \\ tab \t"});
  name_version({{1, 2}, "größe 🙂"});
  name_version({{1, 3}, "no utf8: \xFF\xC0"});
  const std::uint32_t track = add_track("peer </script> \"x\" #1");
  {
    TrackSpan span(track, "serve", {1, 1}, {{"bytes", 5}});
    const Span other("copy", {1, 2}, {{"mode", "a literal"}});
  }
  record("third", {1, 3}, 1'234'567, 2'000'000'000'999);
  const json file = json::parse(to_json(snapshot()));
  const json& process = file["deltasync"]["processes"][0];
  EXPECT_EQ(file["deltasync"]["schema"], "deltasync-trace-1");
  EXPECT_EQ(process["process"], "tr\"ain\\er\n\x01\x7F");
  EXPECT_EQ(process["dropped"], 0);
  EXPECT_GT(process["anchor"]["realtime_us"], 1e15);
  ASSERT_EQ(file["deltasync"]["versions"].size(), 3u);
  EXPECT_EQ(file["deltasync"]["versions"][0]["label"], "quote \" backslash \\ tab \t");
  EXPECT_EQ(file["deltasync"]["versions"][1]["label"], "größe 🙂");
  EXPECT_EQ(file["deltasync"]["versions"][2]["label"], "no utf8: \uFFFD\uFFFD");
  std::map<std::string, json> spans;
  std::map<std::int64_t, std::string> names;
  for (const json& event : file["traceEvents"]) {
    if (event["ph"] == "X") spans[event["name"]] = event;
    if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
  }
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(names[spans["serve"]["tid"]], "peer </script> \"x\" #1");
  EXPECT_EQ(spans["serve"]["args"]["bytes"], 5);
  EXPECT_EQ(spans["copy"]["args"]["mode"], "a literal");
  EXPECT_EQ(spans["copy"]["args"]["label"], "größe 🙂");
  EXPECT_EQ(spans["copy"]["args"]["version"], "0000000000000001:2");
  EXPECT_DOUBLE_EQ(spans["third"]["ts"], 1234.567);
  EXPECT_DOUBLE_EQ(spans["third"]["dur"], 1999998766.432);
}

TEST_F(Trace, SaysWhereItCannotWrite) {
  start();
  const std::filesystem::path dir = testing::TempDir();
  const auto missing = write_timeline(dir / "no such directory" / "trace.json");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code(), Errc::not_found);
  EXPECT_NE(missing.error().message().find("no such directory"), std::string::npos);
  const auto device = write_timeline("/dev/null");
  ASSERT_FALSE(device);
  EXPECT_EQ(device.error().code(), Errc::invalid_argument);
  const std::filesystem::path file = dir / "deltasync-test-trace.json";
  ASSERT_TRUE(write_timeline(file));
  std::ifstream in(file);
  EXPECT_FALSE(json::parse(in)["traceEvents"].empty());
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace deltasync::trace
