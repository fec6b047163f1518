// The file of timeline.md: JSON in the trace event format, one event a line; a complete event ("ph": "X", microseconds)
// for each span. In the file of one process "ts" is CLOCK_MONOTONIC; in a merged one it begins at 0. Beside
// "traceEvents" stands "deltasync":
//
//   schema     deltasync-trace-1; readers refuse any other
//   versions   id, label
//   processes  process, pid, host, clock (processes with the same one share CLOCK_MONOTONIC), anchor (monotonic_us and
//              realtime_us, read together), clocks (looks at others), dropped spans
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <random>
#include <system_error>

#include "base/hash.hpp"
#include "base/trace.hpp"
#include "base/utf8.hpp"

namespace deltasync::trace {
namespace {

namespace fs = std::filesystem;

/// Lines of tracks have these numbers where threads have theirs, which are at most 2^22.
constexpr std::uint64_t kTrackTid = 10'000'000;

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(in, id);
  return id;
}

Digest128 make_clock_id() {
  std::string who = boot_id();
  if (who.empty()) {
    std::random_device random;
    for (int i = 0; i < 4; ++i) who += std::to_string(random());
  }
  std::error_code none;  // kernels before 5.6 have no time namespaces
  who += fs::read_symlink("/proc/self/ns/time", none).string();
  return xxh3_128(std::as_bytes(std::span(who)));
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "?";
  return name.data();
}

/// What JSON can hold: names come from users and peers.
std::string json_text(std::string_view text) {
  const bool utf8 = is_utf8(text);
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", byte);
      out += escape.data();
    } else if (byte >= 0x80 && !utf8) {
      out += "\\ufffd";
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// Microseconds, as trace events have them.
std::string us(std::uint64_t ns) {
  std::array<char, 32> text{};
  const int n =
      std::snprintf(text.data(), text.size(), "%" PRIu64 ".%03u", ns / 1000, static_cast<unsigned>(ns % 1000));
  return {text.data(), static_cast<std::size_t>(n)};
}

std::uint64_t realtime_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

class FileWriter {
 public:
  explicit FileWriter(const Record& record) : record_(record), pid_(std::to_string(::getpid())) {
    for (const Version& version : record.versions) labels_[version.id] = version.label;
  }

  std::string write() {
    out_ = "{\"displayTimeUnit\": \"ms\",\n\"deltasync\": ";
    write_about();
    out_ += ",\n\"traceEvents\": [";
    write_name("process_name", 0, record_.process);
    write_threads();
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  void write_about() {
    std::uint64_t dropped = record_.lost;
    for (const ThreadRecord& thread : record_.threads) dropped += thread.dropped;
    out_ += "{\"schema\": \"deltasync-trace-1\",\n \"processes\": [{\"process\": " + json_text(record_.process) +
            ", \"pid\": " + pid_ + ", \"host\": " + json_text(host_name()) + ", \"boot_id\": " + json_text(boot_id()) +
            ", \"clock\": \"" + to_string(clock_id()) + "\", \"anchor\": {\"monotonic_us\": " + us(now_ns()) +
            ", \"realtime_us\": " + us(realtime_ns()) + "}, \"dropped\": " + std::to_string(dropped) +
            ",\n  \"clocks\": [";
    const char* comma = "";
    for (const ClockSample& sample : record_.clocks) {
      out_ += std::string(comma) + "{\"clock\": \"" + to_string(sample.clock) +
              "\", \"sent_us\": " + us(sample.sent_ns) + ", \"received_us\": " + us(sample.received_ns) +
              ", \"theirs_us\": " + us(sample.theirs_ns) + "}";
      comma = ", ";
    }
    out_ += "]}],\n \"versions\": [";
    comma = "";
    for (const Version& version : record_.versions) {
      out_ += std::string(comma) + "{\"id\": \"" + to_string(version.id) +
              "\", \"label\": " + json_text(version.label) + "}";
      comma = ", ";
    }
    out_ += "]}";
  }

  /// Chrome's metadata events: what the lines of the timeline are called.
  void write_name(const char* what, std::uint64_t tid, const std::string& name) {
    line("{\"ph\": \"M\", \"name\": \"" + std::string(what) + "\", \"pid\": " + pid_ +
         ", \"tid\": " + std::to_string(tid) + ", \"args\": {\"name\": " + json_text(name) + "}}");
  }

  void write_threads() {
    for (const ThreadRecord& thread : record_.threads) write_name("thread_name", tid_of(thread, 0), thread.name);
    for (const auto& [track, name] : record_.tracks) write_name("thread_name", kTrackTid + track, name);
    for (const ThreadRecord& thread : record_.threads) {
      std::vector<Event> events = thread.events;
      // A span before those inside it.
      std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
        return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
      });
      for (const Event& event : events) write_event(thread, event);
    }
  }

  static std::uint64_t tid_of(const ThreadRecord& thread, std::uint32_t track) {
    return track == 0 ? static_cast<std::uint64_t>(thread.tid) : kTrackTid + track;
  }

  void write_event(const ThreadRecord& thread, const Event& event) {
    std::string text = "{\"ph\": \"X\", \"cat\": \"deltasync\", \"name\": " + json_text(event.name) +
                       ", \"pid\": " + pid_ + ", \"tid\": " + std::to_string(tid_of(thread, event.track)) +
                       ", \"ts\": " + us(event.begin_ns) + ", \"dur\": " + us(event.end_ns - event.begin_ns) +
                       ", \"args\": {";
    const char* comma = "";
    if (event.version.valid()) {
      text += "\"version\": \"" + to_string(event.version) + "\"";
      if (const auto label = labels_.find(event.version); label != labels_.end()) {
        text += ", \"label\": " + json_text(label->second);
      }
      comma = ", ";
    }
    for (std::size_t i = 0; i < kArgsMax && event.args[i].name != nullptr; ++i) {
      const bool is_text = (event.texts >> i & 1) != 0;
      text +=
          comma + json_text(event.args[i].name) + ": " +
          (is_text ? json_text(reinterpret_cast<const char*>(event.args[i].value))  // NOLINT: the address of a literal
                   : std::to_string(event.args[i].value));
      comma = ", ";
    }
    line(text + "}}");
  }

  void line(const std::string& text) {
    out_ += first_ ? "\n" : ",\n";
    out_ += text;
    first_ = false;
  }

  const Record& record_;
  const std::string pid_;
  std::map<VersionId, std::string> labels_;
  std::string out_;
  bool first_ = true;
};

}  // namespace

const Digest128& clock_id() {
  static const Digest128 id = make_clock_id();
  return id;
}

std::string to_json(const Record& record) {
  return FileWriter(record).write();
}

}  // namespace deltasync::trace

namespace deltasync {

Status write_timeline(const std::filesystem::path& file) {
  namespace fs = std::filesystem;
  const std::string context = "trace " + file.string();
  std::error_code none;
  const fs::file_status there = fs::status(file, none);
  if (fs::exists(there) && !fs::is_regular_file(there)) {
    return Error(Errc::invalid_argument, context + ": there is something that is no regular file");
  }
  const trace::Record record = trace::snapshot();
  if (!record.started) return Error(Errc::invalid_argument, context + ": nothing was started");
  static std::atomic<unsigned> writes{0};  // each its own file, however many write at once
  fs::path part = file;
  part += "." + std::to_string(::getpid()) + "-" + std::to_string(writes++) + ".tmp";
  errno = 0;
  {
    std::ofstream out(part, std::ios::binary | std::ios::trunc);
    out << trace::to_json(record);
    out.close();
    if (!out) {
      const int error = errno != 0 ? errno : EIO;
      fs::remove(part, none);
      return Error::from_errno(context, error);
    }
  }
  std::error_code failed;
  fs::rename(part, file, failed);
  if (failed) {
    fs::remove(part, none);
    return Error::from_errno(context, failed.value());
  }
  return {};
}

}  // namespace deltasync
