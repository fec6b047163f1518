// One update as a picture: a row a stage, a bar where any thread of the process was at it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "tools/cli/trace_timeline.hpp"

namespace deltasync::tools {
namespace {

constexpr double kWidth = 960;
constexpr double kLeft = 150;   ///< of the bars: names stand before them
constexpr double kRight = 190;  ///< beside them: what was measured
constexpr double kRow = 20;
constexpr double kBar = 12;
constexpr double kHead = 56;
constexpr double kGap = 26;  ///< before each process, for its name
constexpr double kFoot = 14;
constexpr double kBarMin = 1.5;

/// Colours of both kinds of page: the picture is shown by pages that know nothing of it, so it brings its own.
constexpr const char* kStyle =
    "<style>\n"
    "  svg { --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --paper: #ffffff;\n"
    "        --p0: #0969da; --p1: #bc4c00; --p2: #1a7f37; --p3: #8250df; }\n"
    "  @media (prefers-color-scheme: dark) {\n"
    "    svg { --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d; --paper: #0d1117;\n"
    "          --p0: #4493f8; --p1: #f0883e; --p2: #3fb950; --p3: #ab7df8; } }\n"
    "  text { font: 12px system-ui, sans-serif; fill: var(--ink); }\n"
    "  .dim { fill: var(--dim); } .title { font-size: 14px; font-weight: 600; } .process { font-weight: 600; }\n"
    "  .grid { stroke: var(--line); stroke-width: 1; } .paper { fill: var(--paper); }\n"
    "  .p0 { fill: var(--p0); } .p1 { fill: var(--p1); } .p2 { fill: var(--p2); } .p3 { fill: var(--p3); }\n"
    "</style>\n";

std::string number(double value, const char* format = "%.1f") {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

/// Names come from users and peers.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string text_at(double x, double y, const char* style, std::string_view text, const char* anchor = "start") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" class=\"" + style + "\" text-anchor=\"" + anchor +
         "\">" + escaped(text) + "</text>\n";
}

std::string ms(double us) {
  return number(us / 1000, us < 10'000 ? "%.2f ms" : us < 100'000 ? "%.1f ms" : "%.0f ms");
}

std::string megabytes(std::uint64_t bytes) {
  if (bytes == 0) return {};
  if (bytes < 10'000) return ", " + std::to_string(bytes) + " B";
  const double mb = static_cast<double>(bytes) / 1e6;
  return ", " + number(mb, mb < 10 ? "%.2f MB" : mb < 1000 ? "%.1f MB" : "%.0f MB");
}

/// 1, 2 or 5 times a power of ten, so that some eight fit.
double grid_step(double span) {
  const double power = std::pow(10, std::floor(std::log10(std::max(span, 1e-3) / 8)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (span / (factor * power) <= 10) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  Picture(const Timeline& timeline, const VersionId& version)
      : timeline_(timeline), version_(version), stages_(stages_of(timeline, version)) {
    for (const Stage& stage : stages_) {
      if (is_waiting(stage)) continue;
      first_us_ = std::min(first_us_, stage.begin_us);
      last_us_ = std::max(last_us_, stage.end_us);
    }
  }

  std::string draw() {
    std::string rows;
    double y = kHead;
    for (const std::size_t process : order()) {
      y += kGap;
      rows += text_at(8, y - 8, "process", timeline_.processes[process].name);
      for (const Stage& stage : stages_) {
        if (stage.process != process || is_waiting(stage)) continue;
        rows += row(stage, y);
        y += kRow;
      }
    }
    const double height = y + kFoot;
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth, "%.0f") + " " +
           number(height, "%.0f") + "\" role=\"img\" aria-label=\"one update on one timeline\">\n" + kStyle +
           "<rect class=\"paper\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n" +
           text_at(8, 20, "title", timeline_.name_of(version_) + ": " + ms(last_us_ - first_us_)) +
           text_at(kWidth - 8, 20, "dim", "ms after offload was called", "end") + grid(y) + rows + "</svg>\n";
  }

 private:
  /// A receiver that follows waits for the next version from the last one on: that says nothing of this one.
  static bool is_waiting(const Stage& stage) { return stage.name == "plan" || stage.name == "serve plan"; }

  /// Processes by the begin of their first stage.
  std::vector<std::size_t> order() const {
    std::vector<std::size_t> list;
    for (const Stage& stage : stages_) {
      if (!is_waiting(stage) && std::find(list.begin(), list.end(), stage.process) == list.end()) {
        list.push_back(stage.process);
      }
    }
    return list;
  }

  double x_of(double us) const { return kLeft + (us - first_us_) / (last_us_ - first_us_) * (kWidth - kLeft - kRight); }

  static std::string vertical_at(double x, double bottom) {
    return "<line class=\"grid\" x1=\"" + number(x) + "\" x2=\"" + number(x) + "\" y1=\"" + number(kHead - 8) +
           "\" y2=\"" + number(bottom) + "\"/>\n";
  }

  std::string grid(double bottom) const {
    std::string out;
    const double step = grid_step((last_us_ - first_us_) / 1000);
    for (double at = std::ceil(first_us_ / 1000 / step) * step; at * 1000 <= last_us_; at += step) {
      const double x = x_of(at * 1000);
      out += vertical_at(x, bottom);
      out += text_at(x, kHead - 14, "dim", number(at, step < 1 ? "%.1f" : "%.0f"), "middle");
    }
    return out;
  }

  std::string row(const Stage& stage, double y) const {
    const std::string colour = "p" + std::to_string(stage.process % 4);
    std::string out = text_at(kLeft - 8, y + kBar - 2, "", stage.name, "end");
    // Bars that no eye can tell apart are one: the picture has thousands of spans otherwise.
    double begin = -1;
    double end = -1;
    const auto flush = [&] {
      if (end < 0) return;
      out += "<rect class=\"" + colour + "\" x=\"" + number(begin) + "\" y=\"" + number(y) + "\" width=\"" +
             number(std::max(end - begin, kBarMin)) + "\" height=\"" + number(kBar) + "\" rx=\"1\"/>\n";
    };
    for (const auto& [from, to] : stage.intervals) {
      if (end >= 0 && x_of(from) - end < kBarMin) {
        end = x_of(to);
        continue;
      }
      flush();
      begin = x_of(from);
      end = x_of(to);
    }
    flush();
    return out + text_at(kWidth - kRight + 10, y + kBar - 2, "dim",
                         ms(stage.end_us - stage.begin_us) + megabytes(stage.bytes));
  }

  const Timeline& timeline_;
  const VersionId version_;
  const std::vector<Stage> stages_;
  double first_us_ = 0;
  double last_us_ = 1;
};

}  // namespace

std::string to_svg(const Timeline& timeline, const VersionId& version) {
  return Picture(timeline, version).draw();
}

}  // namespace deltasync::tools
