// Collects the entries of a safetensors header from the events of a JSON parser. Events instead of a document:
// a document would silently keep one of two equal keys, and would hold the whole nesting before it could be refused.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "format/safetensors.hpp"

namespace deltasync::safetensors {

/// nlohmann::json's SAX interface. Each event returns false to stop; error() then says why.
class HeaderEvents {
 public:
  bool start_object(std::size_t);
  bool end_object();
  bool start_array(std::size_t);
  bool end_array();
  bool key(std::string& key);
  bool string(std::string& value);
  bool number_unsigned(std::uint64_t value);
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(std::int64_t) { return unexpected("a negative number"); }
  bool number_float(double, const std::string&) { return unexpected("a number that is no unsigned integer"); }
  bool binary(std::vector<std::uint8_t>&) { return unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&);

  std::vector<Entry>& entries() { return entries_; }
  Error error() const { return error_.value_or(Error(Errc::corrupt, "not JSON")); }

 private:
  /// What the next event belongs to.
  enum class At : std::uint8_t {
    start,
    names,
    tensor_value,
    tensor_keys,
    dtype,
    shape,
    offsets,
    metadata_value,
    metadata_keys,
    metadata_string,
    end
  };
  bool fail(Errc code, std::string message);
  bool unexpected(const char* what);
  bool tensor_key(const std::string& key);
  bool finish_tensor();
  std::string where() const;

  At at_ = At::start;
  bool in_array_ = false;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::string tensor_;  ///< being read; empty outside of any
  Entry entry_;
  std::vector<std::uint64_t> offsets_;
  std::unordered_set<std::string> metadata_keys_;
  std::vector<Entry> entries_;
  std::optional<Error> error_;
};

}  // namespace deltasync::safetensors
