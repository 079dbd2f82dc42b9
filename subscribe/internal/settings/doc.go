// Package settings has the options of Handle and Project, and what both do with them: wait for the
// streams, report their health, and call a function in time. It is for package subscribe and its
// subpackages.
package settings
