# Installs expertd for systemd: `make install` as root, `make uninstall` to undo it.
# The package goes into a virtual environment of its own, so that no other Python program can break it.

PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
SYSUSERSDIR ?= $(PREFIX)/lib/sysusers.d
PACKAGEDIR ?= $(PREFIX)/lib/expertd
INSTALL_PYTHON ?= python3
UNITS := expertd.service expertd@.service expertd-warm@.service

.PHONY: install install-package install-files uninstall uninstall-files

install: install-package install-files
	@if [ -d /run/systemd/system ]; then systemd-sysusers; systemctl daemon-reload; fi
	@echo "Set model.path in $(SYSCONFDIR)/expertd/expertd.toml, then: systemctl enable --now expertd"

install-package:
	$(INSTALL_PYTHON) -m venv $(PACKAGEDIR)
	$(PACKAGEDIR)/bin/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt .
	mkdir -p $(PREFIX)/bin
	ln -sf $(PACKAGEDIR)/bin/expertd $(PREFIX)/bin/expertd

# Units name /usr/local/bin; another PREFIX is written in. A configuration that is there is left as it is.
install-files:
	mkdir -p $(UNITDIR) $(SYSUSERSDIR) $(SYSCONFDIR)/expertd $(PREFIX)/share/doc/expertd
	for unit in $(UNITS); do sed 's#/usr/local/bin#$(PREFIX)/bin#' systemd/$$unit > $(UNITDIR)/$$unit; done
	install -m 644 systemd/expertd.sysusers $(SYSUSERSDIR)/expertd.conf
	test -e $(SYSCONFDIR)/expertd/expertd.toml || install -m 644 config/expertd.toml $(SYSCONFDIR)/expertd/expertd.toml
	cp -r config/expertd.toml config/prometheus config/grafana systemd/drop-ins $(PREFIX)/share/doc/expertd/

uninstall: uninstall-files
	rm -rf $(PACKAGEDIR)
	rm -f $(PREFIX)/bin/expertd
	@if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo "Kept: $(SYSCONFDIR)/expertd (configuration) and /var/lib/expertd (profiles)"

uninstall-files:
	@if [ -d /run/systemd/system ]; then systemctl stop expertd.service 'expertd@*' 'expertd-warm@*' 2>/dev/null || true; fi
	@test ! -d $(SYSCONFDIR)/systemd/system || \
	  find $(SYSCONFDIR)/systemd/system -type l -path '*.wants/expertd*.service' -delete
	rm -f $(addprefix $(UNITDIR)/,$(UNITS)) $(SYSUSERSDIR)/expertd.conf
	rm -rf $(PREFIX)/share/doc/expertd
