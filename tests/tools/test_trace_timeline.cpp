// Traces of several processes on one clock: who is measured, who is placed by the time of day, and what is refused.
#include "tools/cli/trace_timeline.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

namespace deltasync::tools {
namespace {

using Json = nlohmann::ordered_json;

const VersionId kVersion{0xE18C, 3};

Json process(const std::string& name, std::int64_t pid, const std::string& clock, double monotonic_us,
             double realtime_us = 1e15) {
  return {{"process", name},        {"pid", pid},
          {"host", name + "-host"}, {"boot_id", "boot-" + clock},
          {"clock", clock},         {"anchor", {{"monotonic_us", monotonic_us}, {"realtime_us", realtime_us}}},
          {"dropped", 0},           {"clocks", Json::array()}};
}

Json span(const std::string& name, std::int64_t pid, double ts, double dur, Json args = Json::object(),
          std::int64_t tid = 1) {
  args["version"] = deltasync::to_string(kVersion);
  return {{"ph", "X"}, {"name", name}, {"pid", pid}, {"tid", tid}, {"ts", ts}, {"dur", dur}, {"args", args}};
}

std::string file(const Json& about, const std::vector<Json>& events) {
  Json versions = Json::array();
  versions.push_back({{"id", deltasync::to_string(kVersion)}, {"label", "step <3>"}});
  Json json{
      {"deltasync", {{"schema", "deltasync-trace-1"}, {"processes", Json::array({about})}, {"versions", versions}}},
      {"traceEvents", events}};
  return json.dump();
}

Timeline parse(const std::string& text) {
  auto parsed = parse_trace(text, "some file");
  EXPECT_TRUE(parsed) << parsed.error().to_string();
  return parsed ? std::move(*parsed) : Timeline();
}

const TraceSpan& find(const Timeline& timeline, const std::string& name) {
  static const TraceSpan none;
  for (const TraceSpan& s : timeline.spans) {
    if (s.name == name) return s;
  }
  ADD_FAILURE() << "no span " << name;
  return none;
}

Json sight(const std::string& clock, double sent, double received, double theirs) {
  return {{"clock", clock}, {"sent_us", sent}, {"received_us", received}, {"theirs_us", theirs}};
}

TEST(Timeline, ProcessesOfOneMachineShareItsClock) {
  const auto a = file(process("trainer", 10, "A", 5e6, 1e15), {span("offload", 10, 1000, 500)});
  const auto b = file(process("agent", 11, "A", 9e6, 2e15), {span("publish", 11, 1400, 300)});
  const Timeline t = merge_traces({parse(a), parse(b)});
  EXPECT_DOUBLE_EQ(find(t, "offload").begin_us, 0);
  EXPECT_DOUBLE_EQ(find(t, "publish").begin_us, 400);
  for (const TraceProcess& p : t.processes) EXPECT_EQ(p.from, ClockFrom::same);
}

TEST(Timeline, AReceiverElsewhereIsPlacedByItsSmallestRoundTripToTheAgent) {
  // The receiver's clock is 1,000,000 µs ahead. The slow look is wrong by 90 µs, the quick one by 5.
  Json receiver = process("receiver", 10, "B", 5e6);
  receiver["clocks"].push_back(sight("A", 1'001'000, 1'001'200, 1'190));
  receiver["clocks"].push_back(sight("A", 1'001'300, 1'001'320, 1'305));
  receiver["clocks"].push_back(sight("C", 1'001'300, 1'001'302, 77));  // of somebody else
  const auto b = file(receiver, {span("pull", 10, 1'001'500, 100)});
  const auto a = file(process("agent", 10, "A", 9e6), {span("publish", 10, 1'400, 50)});
  const Timeline t = merge_traces({parse(b), parse(a)});
  EXPECT_EQ(t.clock, "A");
  EXPECT_EQ(t.processes[0].from, ClockFrom::measured);
  EXPECT_EQ(t.processes[1].from, ClockFrom::same);
  EXPECT_NEAR(t.processes[0].uncertainty_us, 10 + 290 * 100e-6, 0.01);  // half a round trip, and drift since then
  EXPECT_DOUBLE_EQ(find(t, "publish").begin_us, 0);
  EXPECT_NEAR(find(t, "pull").begin_us, 95, 1e-6);
  EXPECT_NE(t.processes[0].pid, t.processes[1].pid);
  EXPECT_EQ(t.processes[1].os_pid, 10);
}

TEST(Timeline, ALookFromLongAgoCountsLessThanALooserOneFromNow) {
  Json receiver = process("receiver", 10, "B", 5e6);
  receiver["clocks"].push_back(sight("A", 0, 10, 5));  // ± 5 µs then, 100 ms a thousand seconds later
  receiver["clocks"].push_back(sight("A", 1e9 - 2000, 1e9 - 1000, 1e9));
  const Timeline t = merge_traces(
      {parse(file(receiver, {span("pull", 10, 1e9 - 100, 100)})), parse(file(process("agent", 11, "A", 9e6), {}))});
  EXPECT_NEAR(t.processes[0].uncertainty_us, 500.15, 0.01);
}

TEST(Timeline, WithoutALookTheTimeOfDayHasToDo) {
  const auto a = file(process("agent", 1, "A", 100, 1e15), {span("publish", 1, 100, 50)});
  const auto b = file(process("receiver", 2, "B", 7000, 1e15 + 500), {span("pull", 2, 7000, 10)});
  const Timeline t = merge_traces({parse(a), parse(b)});
  EXPECT_EQ(t.processes[1].from, ClockFrom::wall);
  EXPECT_NEAR(find(t, "pull").begin_us, 500, 1);
  EXPECT_EQ(to_trace_json(t).find("\"uncertainty_us\""),
            to_trace_json(t).rfind("\"uncertainty_us\""));  // the agent's only
}

TEST(Timeline, TheClockThatMostLookedAtIsTakenWithoutItsOwnFile) {
  // Two receivers of two machines, and the agent's file is not given. One of them has looked at another clock too.
  Json first = process("receiver 1", 10, "B", 5e6);
  first["clocks"].push_back(sight("C", 1'001'000, 1'001'002, 9'000));
  first["clocks"].push_back(sight("A", 1'001'000, 1'001'010, 1'005));
  Json second = process("receiver 2", 11, "D", 7e6);
  second["clocks"].push_back(sight("A", 2'001'000, 2'001'010, 1'005));
  const auto other = process("bystander", 12, "E", 4e6, 1e15 + 1e6);
  const Timeline t = merge_traces({parse(file(first, {span("pull", 10, 1'001'500, 100)})),
                                   parse(file(second, {span("commit", 11, 2'001'600, 100)})),
                                   parse(file(other, {span("open", 12, 4e6, 5)}))});
  EXPECT_EQ(t.clock, "A");
  EXPECT_EQ(t.processes[0].from, ClockFrom::measured);
  EXPECT_EQ(t.processes[1].from, ClockFrom::measured);
  EXPECT_NEAR(find(t, "commit").begin_us - find(t, "pull").begin_us, 100, 1e-6);
  // By the time of day the bystander's 4 s are one second after the first receiver's 5 s.
  EXPECT_EQ(t.processes[2].from, ClockFrom::wall);
  EXPECT_NEAR(find(t, "open").begin_us - find(t, "pull").begin_us, 6e6 - 1'001'500, 1);
}

TEST(Timeline, HostileFilesAreRefused) {
  const auto refused = [](const std::string& text, const std::string& words) {
    const auto parsed = parse_trace(text, "some file");
    ASSERT_FALSE(parsed) << words;
    EXPECT_EQ(parsed.error().code(), Errc::corrupt);
    EXPECT_NE(parsed.error().message().find(words), std::string::npos) << parsed.error().message();
  };
  std::string nested = file(process("p", 1, "A", 0), {span("commit", 1, 0, 1, {{"deep", "HERE"}})});
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  nested.replace(nested.find("\"HERE\""), 6, deep);
  refused(nested, "nested more than 32 levels deep");
  refused("{\"deltasync\": " + std::string(100'000, '['), "nested more than");
  const auto brackets =
      file(process("p", 1, "A", 0), {span("commit", 1, 0, 1, {{"text", std::string(100, '[') + "\"{"}})});
  EXPECT_TRUE(parse_trace(brackets, "some file")) << "brackets in a text are no nesting";

  const std::string good = file(process("p", 4711, "A", 0), {span("commit", 4711, 0, 1)});
  for (const char* pid : {"-1", "9223372036854775807", "18446744073709551615", "1e300", "1.5", "\"1\"", "null"}) {
    std::string bad = good;
    bad.replace(bad.find("4711"), 4, pid);
    refused(bad, "pid is no number");
    bad = good;
    bad.replace(bad.rfind("\"tid\":1") + 6, 1, pid);
    refused(bad, "tid is no number");
  }
  for (const char* field : {"ts", "dur", "monotonic_us", "realtime_us"}) {
    for (const char* time : {"1e308", "-1e308", "9007199254740994"}) {
      std::string bad = good;
      const std::size_t at = bad.find(std::string("\"") + field + "\":") + std::strlen(field) + 3;
      bad.replace(at, bad.find_first_of(",}", at) - at, time);
      refused(bad, std::string(field) + " is no time");
    }
  }
}

TEST(Timeline, ManyProcessesOfOneNumberGetNumbersOfTheirOwn) {
  std::vector<Timeline> traces;
  traces.reserve(3);
  const std::int64_t most = std::int64_t{1} << 53;
  for (int i = 0; i < 3; ++i) traces.push_back(parse(file(process("p", most, "A", 0), {span("commit", most, 0, 1)})));
  const Timeline t = merge_traces(std::move(traces));
  std::set<std::int64_t> pids;
  for (const TraceProcess& p : t.processes) {
    EXPECT_TRUE(pids.insert(p.pid).second);
    EXPECT_LE(p.pid, most);
    EXPECT_EQ(p.os_pid, most);
  }
  EXPECT_TRUE(parse_trace(to_trace_json(t), "merged"));
}

TEST(Timeline, AMergedFileCanBeMergedAgain) {
  Json receiver = process("receiver", 10, "B", 5e6);
  receiver["clocks"].push_back(sight("A", 1'001'300, 1'001'320, 1'310));
  const Timeline once = merge_traces({parse(file(receiver, {span("pull", 10, 1'001'500, 100)})),
                                      parse(file(process("agent", 11, "A", 9e6), {span("publish", 11, 1'400, 50)}))});
  const auto trainer = file(process("trainer", 12, "A", 1e6), {span("offload", 12, 1'000, 300)});
  const Timeline twice = merge_traces({parse(to_trace_json(once)), parse(trainer)});
  EXPECT_DOUBLE_EQ(find(twice, "offload").begin_us, 0);
  EXPECT_NEAR(find(twice, "publish").begin_us, 400, 1e-3);
  EXPECT_NEAR(find(twice, "pull").begin_us, 500, 1e-3);
  EXPECT_EQ(twice.processes[0].from, ClockFrom::measured);
  EXPECT_EQ(twice.labels.at(kVersion), "step <3>");
}

TEST(Timeline, StagesAreCountedFromTheOffload) {
  const auto a = file(process("agent", 1, "A", 100),
                      {span("overlapped diff", 1, 950, 10), span("diff", 1, 1200, 100, {{"bytes", 64}}, 5),
                       span("diff", 1, 1210, 40, {{"part", 0}, {"bytes", 9}}, 5),
                       span("diff", 1, 1220, 60, {{"part", 1}, {"bytes", 9}}, 6), span("publish", 1, 1190, 200)});
  const auto b = file(process("trainer", 2, "A", 100), {span("offload", 2, 1000, 150, {{"bytes", 7}})});
  const Timeline t = merge_traces({parse(a), parse(b)});
  const auto stages = stages_of(t, kVersion);
  ASSERT_EQ(stages.size(), 4u);
  EXPECT_EQ(stages[0].name, "overlapped diff");
  EXPECT_DOUBLE_EQ(stages[0].begin_us, -50);
  EXPECT_EQ(stages[1].name, "offload");
  EXPECT_DOUBLE_EQ(stages[1].begin_us, 0);
  EXPECT_EQ(stages[2].name, "publish");
  EXPECT_EQ(stages[3].name, "diff");
  EXPECT_DOUBLE_EQ(stages[3].begin_us, 200);
  EXPECT_DOUBLE_EQ(stages[3].end_us, 300);
  EXPECT_DOUBLE_EQ(stages[3].busy_us, 160);  // parts inside their stage count once, other threads' as well
  EXPECT_EQ(stages[3].bytes, 64u);
  EXPECT_EQ(stages[3].spans, 3u);
  EXPECT_TRUE(stages_of(t, {1, 1}).empty());
}

TEST(Timeline, AVersionIsFoundByNumberIdAndLabel) {
  Json later = span("offload", 1, 1, 1);
  later["args"]["version"] = deltasync::to_string(VersionId{0xE18C, 4});
  const Timeline t = merge_traces({parse(file(process("p", 1, "A", 0), {span("commit", 1, 0, 1), later}))});
  EXPECT_EQ(*find_version(t, std::nullopt), kVersion);  // committed, though there is a newer one
  EXPECT_EQ(find_version(t, "4")->number, 4u);
  EXPECT_EQ(*find_version(t, "000000000000e18c:3"), kVersion);
  EXPECT_EQ(*find_version(t, "step <3>"), kVersion);
  const auto none = find_version(t, "step 9");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), Errc::not_found);
  EXPECT_FALSE(find_version(Timeline(), std::nullopt));
}

TEST(Timeline, APictureEscapesNames) {
  const Timeline t = merge_traces({parse(file(process("a<b>&", 1, "A", 0), {span("offload", 1, 0, 1000)}))});
  const std::string svg = to_svg(t, kVersion);
  EXPECT_NE(svg.find("a&lt;b&gt;&amp;"), std::string::npos);
  EXPECT_NE(svg.find("step &lt;3&gt;"), std::string::npos);
  EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
}

TEST(Timeline, RefusesWhatIsNoTrace) {
  const auto refused = [](const std::string& text) {
    const auto parsed = parse_trace(text, "dir/bad.json");
    EXPECT_FALSE(parsed);
    if (parsed) return Errc::internal;
    EXPECT_NE(parsed.error().message().find("dir/bad.json"), std::string::npos) << parsed.error().message();
    return parsed.error().code();
  };
  EXPECT_EQ(refused(""), Errc::corrupt);
  EXPECT_EQ(refused("{\"traceEvents\": ["), Errc::corrupt);
  EXPECT_EQ(refused("[]"), Errc::unsupported);
  EXPECT_EQ(refused("{\"traceEvents\": []}"), Errc::unsupported);
  EXPECT_EQ(refused(R"({"deltasync": {"schema": "deltasync-trace-9"}})"), Errc::unsupported);
  EXPECT_EQ(refused(R"({"deltasync": {"schema": "deltasync-trace-1"}})"), Errc::corrupt);
  Json no_anchor = process("p", 1, "A", 0);
  no_anchor.erase("anchor");
  EXPECT_EQ(refused(file(no_anchor, {})), Errc::corrupt);
  Json text_time = span("x", 1, 0, 1);
  text_time["ts"] = "soon";
  EXPECT_EQ(refused(file(process("p", 1, "A", 0), {text_time})), Errc::corrupt);
  Json no_name = span("x", 1, 0, 1);
  no_name.erase("name");
  EXPECT_EQ(refused(file(process("p", 1, "A", 0), {no_name})), Errc::corrupt);
  EXPECT_EQ(refused(R"({"deltasync": 5})"), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync::tools
