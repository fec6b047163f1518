// Result propagation inside coroutines, and how operations are awaited: error codes are values there as well.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "deltasync/result.hpp"

namespace deltasync::net {

/// Completion token: co_await gives a tuple that begins with the error code; nothing throws.
inline constexpr boost::asio::as_tuple_t<boost::asio::use_awaitable_t<>> kAsTuple{};

}  // namespace deltasync::net

/// DS_TRY for coroutines: `DS_CO_TRY(co_await stream.write(…));`
#define DS_CO_TRY(expr)                                                  \
  do {                                                                   \
    auto ds_try_result = (expr);                                         \
    if (!ds_try_result.ok()) co_return std::move(ds_try_result).error(); \
  } while (false)

/// DS_ASSIGN for coroutines.
#define DS_CO_ASSIGN(decl, expr) DS_CO_ASSIGN_IMPL_(decl, expr, DS_CAT_(ds_assign_, __LINE__))
#define DS_CO_ASSIGN_IMPL_(decl, expr, tmp)        \
  auto tmp = (expr);                               \
  if (!tmp.ok()) co_return std::move(tmp).error(); \
  decl = std::move(tmp).value()
