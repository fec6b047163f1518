// Reads of memory that somebody may be writing meanwhile, by who looks afterwards whether nobody was, and else throws
// away what it read. ThreadSanitizer takes each such read for a mistake: inside of a RacingReads it does not look.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define DELTASYNC_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define DELTASYNC_THREAD_SANITIZER
#endif
#endif

#ifdef DELTASYNC_THREAD_SANITIZER
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}
#endif

namespace deltasync {

/// While it lives, what this thread reads may be written by others.
class [[nodiscard]] RacingReads {
 public:
#ifdef DELTASYNC_THREAD_SANITIZER
  RacingReads() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~RacingReads() {
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  RacingReads() = default;
  ~RacingReads() {}
#endif
  RacingReads(const RacingReads&) = delete;
  RacingReads& operator=(const RacingReads&) = delete;
};

}  // namespace deltasync
