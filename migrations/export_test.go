package migrations

import "io/fs"

// UpFrom is exported for the tests, which are an external package because the test servers need
// this one.
var UpFrom = upFrom

const LockTimeout = lockTimeout

func (s Set) FS() fs.FS { return s.fs() }
