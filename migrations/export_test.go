package migrations

import "io/fs"

// For the tests, which are outside: the test servers need this package.
var UpFrom = upFrom

const LockTimeout = lockTimeout

func (s Set) FS() fs.FS { return s.fs() }
