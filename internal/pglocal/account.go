package pglocal

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is the user that the server runs as when this process is root.
type account struct {
	name     string
	uid, gid int
}

// runAs returns the unprivileged account to use, or nil when this process is not root and runs the
// server itself.
func runAs() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.Atoi(u.Uid)
		if err != nil {
			return nil, fmt.Errorf("user id of %s: %w", name, err)
		}
		gid, err := strconv.Atoi(u.Gid)
		if err != nil {
			return nil, fmt.Errorf("group id of %s: %w", name, err)
		}
		return &account{name: name, uid: uid, gid: gid}, nil
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and this machine has neither the user postgres nor nobody")
}

// Reachable returns nil if the server can access dir. For an ordinary user it always can. For root,
// the unprivileged user that runs the server must be able to enter every directory above dir.
// Otherwise the error is one sentence that names the closed directory. dir itself need not exist.
func Reachable(dir string) error {
	acct, err := runAs()
	if err != nil || acct == nil {
		return err
	}
	return acct.reaches(dir)
}

func (a *account) reaches(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("absolute path of %s: %w", dir, err)
	}
	for p := filepath.Dir(dir); ; p = filepath.Dir(p) {
		info, err := os.Stat(p)
		switch {
		case os.IsNotExist(err): // Start creates it with sufficient permissions
		case err != nil:
			return fmt.Errorf("read the permissions of %s: %w", p, err)
		case !a.enters(info):
			return fmt.Errorf("PostgreSQL refuses to run as root, and the user %s cannot enter %s (%s): "+
				"move the data from %s to a directory that this user can enter, for example below /var/lib/tidings",
				a.name, p, info.Mode(), dir)
		}
		if p == filepath.Dir(p) {
			return nil
		}
	}
}

// enters evaluates the mode as the kernel does. It ignores access control lists, which such
// directories seldom have.
func (a *account) enters(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return true
	}
	switch mode := info.Mode().Perm(); {
	case int(st.Uid) == a.uid:
		return mode&0o100 != 0
	case int(st.Gid) == a.gid:
		return mode&0o010 != 0
	default:
		return mode&0o001 != 0
	}
}

// sysProcAttr puts a program into its own process group. For root it also sets the account.
func (a *account) sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if a != nil {
		attr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return attr
}

func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}
