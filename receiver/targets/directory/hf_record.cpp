#include "receiver/targets/directory/hf_record.hpp"

#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

namespace deltasync {
namespace {

constexpr std::uint64_t kFormat = 1;

std::optional<std::uint8_t> hex_digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<std::uint8_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<std::uint8_t>(c - 'a' + 10);
  return std::nullopt;
}

/// Exactly N bytes as lower-case hex digits.
template <std::size_t N>
bool parse_hex(const std::string& text, std::array<std::uint8_t, N>& out) {
  if (text.size() != 2 * N) return false;
  for (std::size_t i = 0; i < N; ++i) {
    const auto high = hex_digit(text[2 * i]);
    const auto low = hex_digit(text[2 * i + 1]);
    if (!high || !low) return false;
    out[i] = static_cast<std::uint8_t>(*high << 4 | *low);
  }
  return true;
}

/// The string field, or empty: an empty one fails the parse that follows.
std::string text_field(const nlohmann::json& json, const char* name) {
  const auto it = json.find(name);
  return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
}

Error bad_field(const char* name) {
  return Error(Errc::corrupt, std::string("bad or missing field \"") + name + "\"");
}

}  // namespace

std::string encode_record(const HfRecord& record) {
  char epoch[17];
  std::snprintf(epoch, sizeof epoch, "%016" PRIx64, record.version.id.epoch);
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["epoch"] = epoch;
  json["number"] = record.version.id.number;
  json["label"] = record.version.label;
  json["layout"] = to_string(record.layout);
  json["root"] = to_string(record.root);
  json["files"] = to_string(record.files);
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Result<HfRecord> decode_record(std::string_view text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Error(Errc::corrupt, "no JSON object");
  const auto format = json.find("format");
  if (format == json.end() || !format->is_number_unsigned()) return bad_field("format");
  if (format->get<std::uint64_t>() != kFormat) return Error(Errc::unsupported, "written by another release");

  HfRecord record;
  std::array<std::uint8_t, 8> epoch{};
  if (!parse_hex(text_field(json, "epoch"), epoch)) return bad_field("epoch");
  for (const std::uint8_t byte : epoch) record.version.id.epoch = record.version.id.epoch << 8 | byte;
  if (!record.version.id.valid()) return bad_field("epoch");
  const auto number = json.find("number");
  if (number == json.end() || !number->is_number_unsigned()) return bad_field("number");
  record.version.id.number = number->get<std::uint64_t>();
  record.version.label = text_field(json, "label");
  if (!parse_hex(text_field(json, "layout"), record.layout.bytes)) return bad_field("layout");
  if (!parse_hex(text_field(json, "root"), record.root.bytes)) return bad_field("root");
  if (!parse_hex(text_field(json, "files"), record.files.bytes)) return bad_field("files");
  return record;
}

}  // namespace deltasync
