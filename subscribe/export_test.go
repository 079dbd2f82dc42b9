package subscribe

import "github.com/tidings/tidings/subscribe/internal/settings"

// CrashPoints makes Handle call fn at the crash points of Bootstrap.
func CrashPoints(fn func(step string)) Option { return func(s *settings.Settings) { s.Step = fn } }

// NoBootstrap takes the option Bootstrap back.
func NoBootstrap() Option { return func(s *settings.Settings) { s.Bootstrap = nil } }
